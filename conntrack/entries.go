package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// The numbers of linux/netfilter/nfnetlink_conntrack.h, for which x/sys has no names.
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK << 8   // IPCTNL_MSG_CT_NEW, 0: an entry
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE

	entryOriginal, entryReply, entryStatus, entryProtoInfo, entryID, entryZone, entryFilter = 1, 2, 3, 4, 12, 18, 25 // CTA_TUPLE_ORIG...

	statusSeenReply = 1 << 1 // IPS_SEEN_REPLY

	protoInfoTCP, protoInfoTCPState = 1, 1 // CTA_PROTOINFO_TCP, CTA_PROTOINFO_TCP_STATE

	tupleIP, tupleProto, tupleZone = 1, 2, 3 // CTA_TUPLE_IP...

	ip4Src, ip4Dst, ip6Src, ip6Dst = 1, 2, 3, 4 // CTA_IP_V4_SRC...

	protoNumber, protoSrc, protoDst = 1, 2, 3 // CTA_PROTO_NUM, CTA_PROTO_SRC_PORT...

	filterOriginal                               = 1                      // CTA_FILTER_ORIG_FLAGS
	filterProtocol, filterSrcPort, filterDstPort = 1 << 3, 1 << 4, 1 << 5 // CTA_FILTER_FLAG...
)

// An Entry is a flow that the kernel tracks: where its first packet came from and went to,
// and the same for the replies that are expected. They differ by address translation.
type Entry struct {
	Original, Reply Tuple
	Zone            uint16   // of the original direction, 0 by default
	TCP             TCPState // of a TCP connection
	Replied         bool     // a packet of the other direction was seen
	key             []byte   // attributes by which the kernel finds the entry
}

// A TCPState is the state of a tracked TCP connection. Its values are those of enum
// tcp_conntrack in linux/netfilter/nf_conntrack_tcp.h, of which only some have a name here.
type TCPState uint8

// Some of the states.
const (
	TCPSynSent     TCPState = 1 // the client's SYN has no reply
	TCPEstablished TCPState = 3
	TCPClose       TCPState = 8 // after a RST
)

// A Tuple is one direction of a flow.
type Tuple struct {
	Protocol            uint8
	Source, Destination netip.AddrPort
}

// Key returns a text that no other entry has.
func (e Entry) Key() string { return string(e.key) }

// parseEntry reads the attributes of an entry. What is missing or malformed stays zero.
func parseEntry(b []byte) Entry {
	original := FindAttribute(b, entryOriginal)
	e := Entry{Original: parseTuple(original), Reply: parseTuple(FindAttribute(b, entryReply))}
	e.Zone = max(uint16Of(FindAttribute(original, tupleZone)), uint16Of(FindAttribute(b, entryZone)))
	if state := FindAttribute(FindAttribute(FindAttribute(b, entryProtoInfo), protoInfoTCP), protoInfoTCPState); len(state) == 1 {
		e.TCP = TCPState(state[0])
	}
	if status := FindAttribute(b, entryStatus); len(status) == 4 {
		e.Replied = binary.BigEndian.Uint32(status)&statusSeenReply != 0
	}
	e.key = AppendAttribute(nil, entryOriginal|unix.NLA_F_NESTED, original)
	for _, kind := range []uint16{entryZone, entryID} {
		if value := FindAttribute(b, kind); value != nil {
			e.key = AppendAttribute(e.key, kind, value)
		}
	}
	return e
}

// parseTuple reads the attributes of a tuple.
func parseTuple(b []byte) Tuple {
	t := Tuple{Source: parseAddrPort(b, ip4Src, ip6Src, protoSrc), Destination: parseDestination(b)}
	if number := FindAttribute(FindAttribute(b, tupleProto), protoNumber); len(number) == 1 {
		t.Protocol = number[0]
	}
	return t
}

// parseDestination reads the destination from the attributes of a tuple.
func parseDestination(b []byte) netip.AddrPort { return parseAddrPort(b, ip4Dst, ip6Dst, protoDst) }

// parseAddrPort reads an address, which is of one of two kinds, and a port from the
// attributes of a tuple.
func parseAddrPort(b []byte, kind4, kind6, port uint16) netip.AddrPort {
	ip := FindAttribute(b, tupleIP)
	value := FindAttribute(ip, kind4)
	if value == nil {
		value = FindAttribute(ip, kind6)
	}
	addr, _ := netip.AddrFromSlice(value)
	return netip.AddrPortFrom(addr, uint16Of(FindAttribute(FindAttribute(b, tupleProto), port)))
}

// uint16Of returns the number in an attribute, such as a port; 0 if there is none.
func uint16Of(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// A Filter limits a dump to the entries of a protocol that have these ports in the original
// direction. A port of 0 is any port.
type Filter struct {
	Protocol                    uint8
	SourcePort, DestinationPort uint16
}

// attributes returns the filter as attributes of a request.
func (f Filter) attributes() []byte {
	flags := uint32(filterProtocol)
	b := appendNested(nil, entryOriginal, func(b []byte) []byte {
		return appendNested(b, tupleProto, func(b []byte) []byte {
			b = AppendAttribute(b, protoNumber, []byte{f.Protocol})
			if f.SourcePort != 0 {
				flags |= filterSrcPort
				b = AppendAttribute(b, protoSrc, binary.BigEndian.AppendUint16(nil, f.SourcePort))
			}
			if f.DestinationPort != 0 {
				flags |= filterDstPort
				b = AppendAttribute(b, protoDst, binary.BigEndian.AppendUint16(nil, f.DestinationPort))
			}
			return b
		})
	})
	return appendNested(b, entryFilter, func(b []byte) []byte {
		return AppendAttribute(b, filterOriginal, binary.NativeEndian.AppendUint32(nil, flags))
	})
}

// Dump calls visit for every entry of a family, AF_INET or AF_INET6, that passes one of the
// filters. It keeps none of them. Visit may see an entry more than once, and entries that
// pass no filter: before Linux 5.8 the kernel ignores filters.
func Dump(family uint8, visit func(Entry), filters ...Filter) error {
	c, err := Dial()
	if err != nil {
		return fmt.Errorf("listing conntrack entries: %w", err)
	}
	defer c.Close()
	for _, f := range filters {
		request := Request{Type: messageGet, Flags: unix.NLM_F_DUMP, Family: family, Attributes: f.attributes()}
		if err := c.Exchange(func(b []byte) { visit(parseEntry(b)) }, request); err != nil {
			return fmt.Errorf("listing conntrack entries: %w", err)
		}
	}
	return nil
}

// Delete deletes entries of a family and returns how many it deleted: entries that have
// ended in the meantime are not counted.
func Delete(family uint8, entries []Entry) (deleted int, err error) {
	if len(entries) == 0 {
		return 0, nil
	}
	c, err := Dial()
	if err != nil {
		return 0, fmt.Errorf("deleting a conntrack entry: %w", err)
	}
	defer c.Close()
	for _, e := range entries {
		err := c.Exchange(func([]byte) {}, Request{Type: messageDelete, Flags: unix.NLM_F_ACK, Family: family, Attributes: e.key})
		switch {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT):
			return deleted, fmt.Errorf("deleting a conntrack entry: %w", err)
		}
	}
	return deleted, nil
}
