package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_NEW // an entry
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE

	// Constants without a name in the library: CTA_FILTER, CTA_STATUS_MASK, CTA_TUPLE_ZONE, CTA_FILTER_ORIG_FLAGS,
	// CTA_FILTER_FLAG(CTA_PROTO_NUM), (CTA_PROTO_SRC_PORT), (CTA_PROTO_DST_PORT), IPS_SEEN_REPLY.
	entryFilter, entryStatusMask                 = 25, 26
	tupleZone                                    = 3
	filterOriginal                               = 1
	filterProtocol, filterSrcPort, filterDstPort = 1 << 3, 1 << 4, 1 << 5
	seenReply                                    = 1 << 1
)

// An Entry is a flow that the kernel tracks. Original has the source and the destination of its first packet, and
// Reply has the source and the destination of the expected replies. Unless addresses were translated, each is the
// reverse of the other.
type Entry struct {
	Original, Reply Tuple
	Zone            uint16   // the zone of the original direction, 0 by default
	Replied         bool     // whether a packet in the reply direction was seen
	TCP             TCPState // the state of a TCP connection
	key             []byte   // the attributes by which the kernel finds the entry
}

// A TCPState is the state of a tracked TCP connection. Its values are the values of enum
// tcp_conntrack in linux/netfilter/nf_conntrack_tcp.h, of which only some have a name here.
type TCPState uint8

// Some of the states.
const (
	TCPSynSent TCPState = 1 // the client's SYN has no reply
	TCPClose   TCPState = 8 // after a RST
)

// A Tuple is one direction of a flow.
type Tuple struct {
	Protocol            uint8
	Source, Destination netip.AddrPort
}

// parseEntry reads the attributes of an entry, without the key. Fields that are missing or
// malformed stay zero.
func parseEntry(b []byte) Entry {
	original := findAttribute(b, nl.CTA_TUPLE_ORIG)
	e := Entry{Original: parseTuple(original), Reply: parseTuple(findAttribute(b, nl.CTA_TUPLE_REPLY))}
	e.Zone = max(uint16Of(findAttribute(original, tupleZone)), uint16Of(findAttribute(b, nl.CTA_ZONE)))
	tcp := findAttribute(findAttribute(b, nl.CTA_PROTOINFO), nl.CTA_PROTOINFO_TCP)
	if state := findAttribute(tcp, nl.CTA_PROTOINFO_TCP_STATE); len(state) == 1 {
		e.TCP = TCPState(state[0])
	}
	if status := findAttribute(b, nl.CTA_STATUS); len(status) == 4 {
		e.Replied = binary.BigEndian.Uint32(status)&seenReply != 0
	}
	return e
}

// entryKey returns the attributes of an entry by which the kernel finds it.
func entryKey(b []byte) (key []byte) {
	for _, kind := range []uint16{nl.CTA_TUPLE_ORIG, nl.CTA_ZONE, nl.CTA_ID} {
		key = append(key, wholeAttribute(b, kind)...)
	}
	return key
}

// parseTuple reads the attributes of a tuple.
func parseTuple(b []byte) Tuple {
	t := Tuple{Source: parseAddrPort(b, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT), Destination: parseDestination(b)}
	if number := findAttribute(findAttribute(b, nl.CTA_TUPLE_PROTO), nl.CTA_PROTO_NUM); len(number) == 1 {
		t.Protocol = number[0]
	}
	return t
}

// parseDestination reads the destination from the attributes of a tuple.
func parseDestination(b []byte) netip.AddrPort {
	return parseAddrPort(b, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT)
}

// parseAddrPort reads an address of one of two kinds, and a port, from the
// attributes of a tuple.
func parseAddrPort(b []byte, kind4, kind6, port uint16) netip.AddrPort {
	ip := findAttribute(b, nl.CTA_TUPLE_IP)
	value := findAttribute(ip, kind4)
	if value == nil {
		value = findAttribute(ip, kind6)
	}
	addr, _ := netip.AddrFromSlice(value)
	return netip.AddrPortFrom(addr, uint16Of(findAttribute(findAttribute(b, nl.CTA_TUPLE_PROTO), port)))
}

// uint16Of returns the number in an attribute, such as a port; 0 if there is none.
func uint16Of(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// A Filter limits a dump to some entries. A zero field limits nothing.
type Filter struct {
	Protocol                    uint8
	SourcePort, DestinationPort uint16 // ports of the original direction; only with a protocol
	Unreplied                   bool   // only entries without a packet in the reply direction
}

// passes reports whether an entry passes the filter.
func (f Filter) passes(e Entry) bool {
	return (f.Protocol == 0 || e.Original.Protocol == f.Protocol) &&
		(f.SourcePort == 0 || e.Original.Source.Port() == f.SourcePort) &&
		(f.DestinationPort == 0 || e.Original.Destination.Port() == f.DestinationPort) &&
		(!f.Unreplied || !e.Replied)
}

// attributes returns the filter as attributes of a request. Kernels ignore attributes that they do not know:
// CTA_FILTER before Linux 5.8, and CTA_STATUS before 5.15.
func (f Filter) attributes() (b []byte) {
	if f.Protocol != 0 {
		b = append(b, f.tuple()...)
	}
	if f.Unreplied {
		b = append(b, nl.NewRtAttr(nl.CTA_STATUS, nl.BEUint32Attr(0)).Serialize()...)
		b = append(b, nl.NewRtAttr(entryStatusMask, nl.BEUint32Attr(seenReply)).Serialize()...)
	}
	return b
}

// tuple returns the protocol and the ports as attributes of a request.
func (f Filter) tuple() []byte {
	flags := uint32(filterProtocol)
	tuple := nl.NewRtAttr(nl.CTA_TUPLE_ORIG|unix.NLA_F_NESTED, nil)
	protocol := tuple.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
	protocol.AddRtAttr(nl.CTA_PROTO_NUM, []byte{f.Protocol})
	if f.SourcePort != 0 {
		flags |= filterSrcPort
		protocol.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(f.SourcePort))
	}
	if f.DestinationPort != 0 {
		flags |= filterDstPort
		protocol.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(f.DestinationPort))
	}
	filter := nl.NewRtAttr(entryFilter|unix.NLA_F_NESTED, nil)
	filter.AddRtAttr(filterOriginal, nl.Uint32Attr(flags))
	return append(tuple.Serialize(), filter.Serialize()...)
}

// Dump calls the function visit for every entry of a family (AF_INET or AF_INET6) that passes one of the filters,
// perhaps more than once. It keeps no entry. The kernel filters as far as it can, and Dump checks the entries that
// the kernel returns. For each filter the kernel walks through its whole table.
func Dump(family uint8, visit func(Entry), filters ...Filter) error {
	for _, f := range filters {
		request := Request{Type: messageGet, Flags: unix.NLM_F_DUMP, Family: family, Attributes: f.attributes()}
		passed := func(b []byte) {
			if e := parseEntry(b); f.passes(e) {
				e.key = entryKey(b)
				visit(e)
			}
		}
		err := Exchange(passed, request)
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) { // the kernel refuses the filter
			request.Attributes = nil
			err = Exchange(passed, request)
		}
		if err != nil {
			return fmt.Errorf("listing conntrack entries: %w", err)
		}
	}
	return nil
}

// Delete deletes entries of a family and returns how many it deleted. It does not count entries that have ended in
// the meantime.
func Delete(family uint8, entries []Entry) (deleted int, err error) {
	for _, e := range entries {
		err := Exchange(func([]byte) {}, Request{Type: messageDelete, Flags: unix.NLM_F_ACK, Family: family, Attributes: e.key})
		switch {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT):
			return deleted, fmt.Errorf("deleting a conntrack entry: %w", err)
		}
	}
	return deleted, nil
}
