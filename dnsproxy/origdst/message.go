package origdst

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"
)

// What linux/netfilter/nfnetlink_conntrack.h numbers.
const (
	messageNew = unix.NFNL_SUBSYS_CTNETLINK << 8   // IPCTNL_MSG_CT_NEW, 0: an entry
	messageGet = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET

	tupleOriginal = 1 // CTA_TUPLE_ORIG
	tupleReply    = 2 // CTA_TUPLE_REPLY

	tupleIP    = 1 // CTA_TUPLE_IP
	tupleProto = 2 // CTA_TUPLE_PROTO

	ip4Src, ip4Dst, ip6Src, ip6Dst = 1, 2, 3, 4 // CTA_IP_V4_SRC...

	protoNumber, protoSrc, protoDst = 1, 2, 3 // CTA_PROTO_NUM, CTA_PROTO_SRC_PORT...
)

const (
	netlinkHeader   = unix.SizeofNlMsghdr // length 4, type 2, flags 2, sequence 4, port 4
	netfilterHeader = 4                   // family 1, version 1, resource 2
	headers         = netlinkHeader + netfilterHeader
	attributeHeader = unix.SizeofNlAttr // length 2, type 2
	attributeType   = 0x3fff            // without the flags for nested and for network byte order
)

// errMalformed is the error for a response that is not what the kernel documents.
var errMalformed = errors.New("malformed response")

// appendRequest appends the request for the entry whose reply goes from src to dst.
// Both are of one family.
func appendRequest(b []byte, seq uint32, src, dst netip.AddrPort) []byte {
	start := len(b)
	family, srcType, dstType := byte(unix.AF_INET), uint16(ip4Src), uint16(ip4Dst)
	if src.Addr().Is6() {
		family, srcType, dstType = unix.AF_INET6, ip6Src, ip6Dst
	}
	b = binary.NativeEndian.AppendUint32(b, 0) // the length, below
	b = binary.NativeEndian.AppendUint16(b, messageGet)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, family, unix.NFNETLINK_V0, 0, 0)
	b = appendNested(b, tupleReply, func(b []byte) []byte {
		b = appendNested(b, tupleIP, func(b []byte) []byte {
			b = appendAttribute(b, srcType, src.Addr().AsSlice())
			return appendAttribute(b, dstType, dst.Addr().AsSlice())
		})
		return appendNested(b, tupleProto, func(b []byte) []byte {
			b = appendAttribute(b, protoNumber, []byte{unix.IPPROTO_UDP})
			b = appendAttribute(b, protoSrc, binary.BigEndian.AppendUint16(nil, src.Port()))
			return appendAttribute(b, protoDst, binary.BigEndian.AppendUint16(nil, dst.Port()))
		})
	})
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// appendAttribute appends one attribute and fills it up to a multiple of 4 bytes.
func appendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attributeHeader+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, align(len(value))-len(value))...)
}

// appendNested appends an attribute with what fill appends as its value.
func appendNested(b []byte, kind uint16, fill func([]byte) []byte) []byte {
	start := len(b)
	b = fill(appendAttribute(b, kind|unix.NLA_F_NESTED, nil))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// align returns n, rounded up to a multiple of 4.
func align(n int) int { return (n + 3) &^ 3 }

// parseResponse returns the original destination of the entry in a message, or the
// error that the kernel answered with. Ours is false if the message does not answer
// the request with the number seq.
func parseResponse(b []byte, seq uint32) (original netip.AddrPort, ours bool, err error) {
	if len(b) < headers {
		return original, true, errMalformed
	}
	length, kind := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint16(b[4:])
	if binary.NativeEndian.Uint32(b[8:]) != seq {
		return original, false, nil
	}
	if length < headers || uint64(length) > uint64(len(b)) {
		return original, true, errMalformed
	}
	b = b[:length]
	switch kind {
	case unix.NLMSG_ERROR:
		code := int32(binary.NativeEndian.Uint32(b[netlinkHeader:]))
		if code >= 0 {
			return original, true, errMalformed // an acknowledgement, not asked for
		}
		return original, true, unix.Errno(-code)
	case messageNew:
		original, err = parseEntry(b[headers:])
		return original, true, err
	}
	return original, true, errMalformed
}

// parseEntry returns the original destination in an entry's attributes.
func parseEntry(b []byte) (netip.AddrPort, error) {
	tuple := find(b, tupleOriginal)
	ip, proto := find(tuple, tupleIP), find(tuple, tupleProto)
	addr := find(ip, ip4Dst)
	if addr == nil {
		addr = find(ip, ip6Dst)
	}
	dst, ok := netip.AddrFromSlice(addr)
	port := find(proto, protoDst)
	if !ok || len(port) != 2 {
		return netip.AddrPort{}, errMalformed
	}
	return netip.AddrPortFrom(dst, binary.BigEndian.Uint16(port)), nil
}

// find returns the value of the first attribute of a kind; nil if there is none, or
// if b is malformed before it.
func find(b []byte, kind uint16) []byte {
	for len(b) >= attributeHeader {
		length := int(binary.NativeEndian.Uint16(b))
		if length < attributeHeader || length > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&attributeType == kind {
			return b[attributeHeader:length]
		}
		b = b[min(align(length), len(b)):]
	}
	return nil
}
