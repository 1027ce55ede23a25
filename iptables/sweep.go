package iptables

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/conntrack"
)

// sweepFilters limit a dump to the entries that a sweep may drop: UDP from or to port 53.
func sweepFilters() []conntrack.Filter {
	return []conntrack.Filter{
		{Protocol: unix.IPPROTO_UDP, DestinationPort: dnsPort},
		{Protocol: unix.IPPROTO_UDP, SourcePort: dnsPort},
	}
}

// dropEntries deletes the conntrack entries of a family that match, and returns how many.
func dropEntries(f Family, match func(conntrack.Entry) bool) (int, error) {
	var matched []conntrack.Entry
	err := conntrack.Dump(f.number(), func(e conntrack.Entry) {
		if match(e) {
			matched = append(matched, e)
		}
	}, sweepFilters()...)
	deleted := 0
	if err == nil {
		deleted, err = conntrack.Delete(f.number(), matched)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", f, err)
	}
	return deleted, err
}

// A sweep tells which conntrack entries keep queries on a path that the rules no longer
// give them. It concerns UDP only: a TCP connection stays with the peer it was made to, or
// breaks.
type sweep struct {
	ports []uint16 // of the agent, now or previously
	zone  uint16   // of captured queries, 0 without one
}

// stale reports whether an entry has to be dropped after rules were installed.
//
// With a zone, the entry of a captured query is in that zone and redirected. An entry in
// the zone that is not redirected, or to another port, was made while the rules were
// incomplete. The entries in other zones are leftovers, or belong to the agent and to
// excluded clients.
//
// Without a zone, an entry that is not redirected may belong to any of them.
func (s sweep) stale(e conntrack.Entry) bool {
	switch {
	case ofReply(e):
		return true
	case e.Original.Protocol != unix.IPPROTO_UDP, e.Original.Destination.Port() != dnsPort:
		return false
	default:
		return e.Zone == s.zone && !s.redirected(e) // 0 without a zone
	}
}

// ofReply reports whether a reply made an entry of its own, because it arrived after the entry
// of its query was dropped. In that entry, the next query from the same port counts as a reply,
// so it is not redirected.
func ofReply(e conntrack.Entry) bool {
	return e.Original.Protocol == unix.IPPROTO_UDP &&
		e.Original.Source.Port() == dnsPort && e.Original.Destination.Port() != dnsPort
}

// leftover reports whether an entry has to be dropped some time after rules with a zone
// were installed. It is redirected and not in the zone, so it was made while table raw had
// no rules: the application uses it no longer, but the agent would, from the same source
// port. It can be dropped when no reply can be in flight.
func (s sweep) leftover(e conntrack.Entry) bool {
	return s.zone != 0 && e.Zone != s.zone && s.toAgent(e)
}

// orphaned reports whether an entry has to be dropped after rules were removed. Captured
// queries in the zone are left alone: no new query enters it, and a reply may be in flight.
func (s sweep) orphaned(e conntrack.Entry) bool {
	return e.Zone == 0 && s.toAgent(e)
}

// toAgent reports whether an entry is of a UDP query that is redirected to the agent.
func (s sweep) toAgent(e conntrack.Entry) bool {
	return e.Original.Protocol == unix.IPPROTO_UDP && e.Original.Destination.Port() == dnsPort && s.redirected(e)
}

// redirected reports whether an entry is redirected to the agent.
func (s sweep) redirected(e conntrack.Entry) bool {
	return slices.Contains(s.ports, e.Reply.Source.Port())
}
