package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_NEW // an entry
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE

	// Constants without a name in the library: CTA_TUPLE_ZONE, IPS_SEEN_REPLY.
	tupleZone = 3
	seenReply = 1 << 1
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

// List returns the entries of a family (AF_INET or AF_INET6) for which match returns true, some of them perhaps more than
// once.
func List(family uint8, match func(Entry) bool) (matched []Entry, err error) {
	err = Exchange(func(b []byte) {
		if e := parseEntry(b); match(e) {
			e.key = entryKey(b)
			matched = append(matched, e)
		}
	}, Request{Type: messageGet, Flags: unix.NLM_F_DUMP, Family: family})
	if err != nil {
		return nil, fmt.Errorf("listing conntrack entries: %w", err)
	}
	return matched, nil
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

// Usage returns how many entries connection tracking of this network namespace has, and how many the kernel allows.
// When there are as many as allowed, the kernel drops the first packet of every further flow. Both are 0 if they
// cannot be read. Usage needs no capability.
func Usage() (entries, limit uint64) { return setting("count"), setting("max") }

// setting reads a setting of connection tracking, 0 if there is none.
func setting(name string) uint64 {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // 0 on an error
	return n
}
