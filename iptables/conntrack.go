package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// Messages and attributes of conntrack (linux/netfilter/nfnetlink_conntrack.h),
// those that x/sys has no names for.
const (
	ctGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	ctDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	ctaOriginal = 1
	ctaReply    = 2
	ctaStatus   = 3
	ctaID       = 12
	ctaZone     = 18

	ctaTupleIP       = 1
	ctaTupleProtocol = 2
	ctaTupleZone     = 3

	ctaIPv4Source      = 1
	ctaIPv4Destination = 2
	ctaIPv6Source      = 3
	ctaIPv6Destination = 4

	ctaProtocol        = 1
	ctaSourcePort      = 2
	ctaDestinationPort = 3

	statusReplySeen = 1 << 1
)

// flow is an entry of conntrack: where a flow's first packet came from and went
// to, and the same for the replies that are expected. NAT is where they differ.
type flow struct {
	udp             bool
	original, reply tuple
	zone            uint16 // of the original direction
	replied         bool
	key             []byte // attributes by which the kernel finds it again
}

// tuple is one direction of a flow.
type tuple struct {
	source, destination netip.AddrPort
	protocol            uint8
	zone                uint16
}

// parseFlow reads one message of a dump; the family before the attributes is
// skipped. Data that is cut short gives a flow that nobody looks for.
func parseFlow(data []byte) flow {
	as := attributes(data[min(4, len(data)):])
	f := flow{original: parseTuple(as[ctaOriginal]), reply: parseTuple(as[ctaReply])}
	f.udp = f.original.protocol == unix.IPPROTO_UDP
	f.zone = max(f.original.zone, port(as[ctaZone]))
	if status := as[ctaStatus]; len(status) == 4 {
		f.replied = binary.BigEndian.Uint32(status)&statusReplySeen != 0
	}
	f.key = attribute(ctaOriginal|unix.NLA_F_NESTED, as[ctaOriginal])
	for _, kind := range []uint16{ctaZone, ctaID} {
		if value, ok := as[kind]; ok {
			f.key = append(f.key, attribute(kind, value)...)
		}
	}
	return f
}

func parseTuple(b []byte) tuple {
	as := attributes(b)
	ip, protocol := attributes(as[ctaTupleIP]), attributes(as[ctaTupleProtocol])
	address := func(v4, v6 uint16) netip.Addr {
		if a, ok := netip.AddrFromSlice(ip[v4]); ok {
			return a
		}
		a, _ := netip.AddrFromSlice(ip[v6])
		return a
	}
	t := tuple{
		source:      netip.AddrPortFrom(address(ctaIPv4Source, ctaIPv6Source), port(protocol[ctaSourcePort])),
		destination: netip.AddrPortFrom(address(ctaIPv4Destination, ctaIPv6Destination), port(protocol[ctaDestinationPort])),
		zone:        port(as[ctaTupleZone]),
	}
	if p := protocol[ctaProtocol]; len(p) == 1 {
		t.protocol = p[0]
	}
	return t
}

// port reads a port or a zone; 0 if there is none.
func port(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// How a dump is limited. The kernel filters since 5.8; before, it returns all entries.
const (
	ctaFilter              = 25
	ctaFilterOriginalFlags = 1
	filterProtocol         = 1 << 3
	filterSourcePort       = 1 << 4
	filterDestinationPort  = 1 << 5
)

// A dump limits a listing to entries of a protocol with port 53 as a port of the
// original direction: ctaSourcePort or ctaDestinationPort.
type dump struct {
	protocol uint8
	port     uint16
}

// overUDP are the dumps of what a sweep may drop.
func overUDP() []dump {
	return []dump{{unix.IPPROTO_UDP, ctaDestinationPort}, {unix.IPPROTO_UDP, ctaSourcePort}}
}

// request returns the attributes of the request.
func (d dump) request() []byte {
	flags := map[uint16]uint32{ctaSourcePort: filterSourcePort, ctaDestinationPort: filterDestinationPort}[d.port]
	protocol := append(attribute(ctaProtocol, []byte{d.protocol}),
		attribute(d.port, binary.BigEndian.AppendUint16(nil, dnsPort))...)
	tuple := attribute(ctaTupleProtocol|unix.NLA_F_NESTED, protocol)
	filter := attribute(ctaFilterOriginalFlags, binary.NativeEndian.AppendUint32(nil, filterProtocol|flags))
	return append(attribute(ctaOriginal|unix.NLA_F_NESTED, tuple), attribute(ctaFilter|unix.NLA_F_NESTED, filter)...)
}

// eachFlow hands the entries of a family that are in some dumps, and maybe others, to a
// function, one by one as they are read.
func eachFlow(f Family, dumps []dump, each func(flow)) error {
	n, err := dialNetlink()
	if err != nil {
		return err
	}
	defer n.close()
	for _, d := range dumps {
		request := n.message(ctGet, unix.NLM_F_DUMP, f.number(), d.request())
		err = n.exchange(request, func(m syscall.NetlinkMessage) { each(parseFlow(m.Data)) })
		if err != nil {
			return fmt.Errorf("listing conntrack entries of %s: %w", f, err)
		}
	}
	return nil
}

// dropFlows deletes the entries of a family that a function picks, and returns how
// many. It keeps no others in memory.
func dropFlows(f Family, pick func(flow) bool) (int, error) {
	var picked []flow
	err := eachFlow(f, overUDP(), func(fl flow) {
		if pick(fl) {
			picked = append(picked, fl)
		}
	})
	if err != nil || len(picked) == 0 {
		return 0, err
	}
	n, err := dialNetlink()
	if err != nil {
		return 0, err
	}
	defer n.close()
	dropped := 0
	for _, fl := range picked {
		err := n.exchange(n.message(ctDelete, unix.NLM_F_ACK, f.number(), fl.key), func(syscall.NetlinkMessage) {})
		switch {
		case err == nil:
			dropped++
		case !errors.Is(err, unix.ENOENT): // it ended by itself
			return dropped, fmt.Errorf("deleting a conntrack entry of %s: %w", f, err)
		}
	}
	return dropped, nil
}

// sweep says which entries would keep queries on a path that is not theirs any
// more. Only UDP: a TCP connection ends where it began, and breaks otherwise.
type sweep struct {
	ports []uint16 // the agent's, now or formerly
	zone  uint16   // of captured queries, 0 without one
}

// stale is for rules that have come in.
//
// With a zone, a captured query's entry is in that zone and redirected. One that
// is in the zone and not redirected, or to another port, was made while the
// rules were not complete. All other entries are leftovers, or of the agent and of
// what is excluded.
//
// Without a zone, what is not redirected may be anybody's.
func (s sweep) stale(f flow) bool {
	switch {
	case !f.udp:
		return false
	case f.original.source.Port() == dnsPort && f.original.destination.Port() != dnsPort:
		// A reply whose query's entry was gone has made an entry of its own, in
		// which a query from the same port counts as the reply.
		return true
	case f.original.destination.Port() != dnsPort:
		return false
	default:
		return f.zone == s.zone && !s.redirected(f) // 0 without a zone
	}
}

// leftover is for rules with a zone that have come in. An entry that is redirected and
// not in the zone was made while table raw had no rules: the application does not use it
// any more, but the agent would, from the same source port. It can be dropped when no
// reply can be on its way.
func (s sweep) leftover(f flow) bool {
	return f.udp && s.zone != 0 && f.zone != s.zone && f.original.destination.Port() == dnsPort && s.redirected(f)
}

// orphaned is for rules that have gone. Captured queries in the zone are left
// alone: nothing enters it any more, and a reply may be on its way to them.
func (s sweep) orphaned(f flow) bool {
	return f.udp && f.original.destination.Port() == dnsPort && f.zone == 0 && s.redirected(f)
}

// redirected says whether a flow goes to the agent.
func (s sweep) redirected(f flow) bool {
	return slices.Contains(s.ports, f.reply.source.Port())
}
