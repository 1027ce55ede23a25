package iptables

import (
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/logonce"
)

// entries drops conntrack entries that keep sockets on the path of previous rules: to the agent, or past the agent.
type entries struct {
	log    *slog.Logger
	due    time.Time // when to sweep again after the last change of rules; zero if that was done
	last   time.Time // until when sweeps that drop entries are followed by another one
	failed bool      // the last sweep failed
	logged map[family.Family]*logonce.Failure
}

func newEntries(log *slog.Logger) entries {
	return entries{log: log, logged: map[family.Family]*logonce.Failure{family.IPv4: {}, family.IPv6: {}}}
}

// needsSweep reports whether a sweep is still to come although the rules have not changed since the last sweep.
func (e *entries) needsSweep() bool { return e.failed || !e.due.IsZero() }

// repeatTime is how long after the settle time sweeps go on while they drop entries.
const repeatTime = 30 * time.Second

// sweep drops entries that let queries bypass the agent: after a change of rules, and once more when the settle time has
// passed. No reply to a query from before the change is in flight any more then, so the second sweep also drops leftovers
// (see [sweep.leftover]), and the entries of replies that arrived after the first sweep. Between the two, sweep does
// nothing. A socket that is always in use has a reply in flight whenever its entry is dropped, so a sweep that has dropped
// entries is followed by another one at the next check. After a failure, the next check sweeps again.
func (e *entries) sweep(cfg Config, inst installation, changed bool) {
	now := time.Now()
	switch changed = changed || e.failed; {
	case changed:
		e.due, e.last = now.Add(cfg.Settle), now.Add(cfg.Settle+repeatTime)
	case now.Before(e.due):
		return
	default:
		e.due = time.Time{}
	}
	e.failed = false
	for f, v := range inst.families {
		s := sweep{ports: []uint16{cfg.Port}, zone: v.zone}
		dropped, ok := e.drop(f, s.bypassing(changed))
		if ok && changed && len(cfg.vipRanges(f)) > 0 {
			_, ok = e.drop(f, func(e conntrack.Entry) bool { return bypassesVIPs(cfg, e) })
		}
		e.failed = e.failed || !ok
		if !changed && dropped > 0 && now.Before(e.last) {
			e.due = now
		}
	}
}

// drop drops the entries of family f for which match returns true, and returns how many there were. After a failure, ok is
// false. A failure that repeats is logged once.
func (e *entries) drop(f family.Family, match func(conntrack.Entry) bool) (dropped int, ok bool) {
	matched, err := conntrack.List(f.Number(), match)
	if err == nil {
		dropped, err = conntrack.Delete(f.Number(), matched)
	}
	if e.logged[f].Differs(err) {
		e.log.Warn("dropping conntrack entries failed: open sockets may keep their previous path until they are closed",
			"family", f, "error", err)
	}
	if dropped > 0 {
		e.log.Debug("dropped conntrack entries", "family", f, "entries", dropped)
	}
	return dropped, err == nil
}

// A sweep finds conntrack entries that keep queries on the path of previous rules. It looks for entries of UDP, and
// for entries of TCP that the next connection from the same port would take over: see [ended]. It ignores the entries
// of other TCP connections, because an open connection cannot change its path.
type sweep struct {
	ports []uint16 // ports of the agent, now or previously
	zone  uint16   // zone of captured queries, 0 without one
}

// bypassing returns a function that reports whether an entry lets queries bypass the agent, or would send queries of the
// agent back to it. changed is true after a change of rules, and false when the settle time has passed.
func (s sweep) bypassing(changed bool) func(conntrack.Entry) bool {
	return func(e conntrack.Entry) bool {
		stale := (changed || s.zone != 0) && s.stale(e)
		return stale || !s.redirected(e) && ended(e, changed) || !changed && (ofReply(e) || s.leftover(e))
	}
}

// stale reports whether an entry has to be dropped after rules were installed.
//
// With a zone, the entry of a captured query is in that zone and redirected. If an entry in
// the zone is not redirected, or is redirected to another port, it was made while the rules
// were incomplete. The entries in other zones are leftovers, or belong to the agent and to
// excluded clients.
//
// Without a zone, an entry that is not redirected may belong to a captured query, to the agent or to an excluded
// client. Nothing distinguishes these entries, so all have to be dropped.
func (s sweep) stale(e conntrack.Entry) bool {
	return isDNS(e, unix.IPPROTO_UDP) && e.Zone == s.zone && !s.redirected(e) // s.zone is 0 if the rules have no zone
}

// ofReply reports whether an entry was made by a reply that arrived after the entry of its query was dropped. In
// such an entry, the next query from the same port counts as a reply, so that query is not redirected.
func ofReply(e conntrack.Entry) bool {
	return e.Original.Protocol == unix.IPPROTO_UDP &&
		e.Original.Source.Port() == dnsPort && e.Original.Destination.Port() != dnsPort
}

// ended reports whether an entry belongs to a TCP connection that is not open, so the next connection from the same port
// takes over the entry, and its path: a RST of the server has ended it, or the kernel has seen no reply. The kernel makes an
// entry without a reply also when it begins to track connections in the middle, for example when rules are installed after
// `nft flush ruleset`. Such entries stay for up to five minutes. If unanswered is false, the connection may also be one whose
// SYN has no reply yet, as of the agent to a nameserver, and is not reported.
func ended(e conntrack.Entry, unanswered bool) bool {
	return isDNS(e, unix.IPPROTO_TCP) && (e.TCP == conntrack.TCPClose || !e.Replied && (unanswered || e.TCP != conntrack.TCPSynSent))
}

// bypassesVIPs reports whether an entry of a connection to a VIP has to be dropped after a change of rules: it is not
// redirected and has no reply. A client that connected before the rules were installed repeats its SYN for two
// minutes, and the entry decides the path of each SYN. A flow of UDP is refused when its entry has ended, 30 s after
// its last packet.
func bypassesVIPs(cfg Config, e conntrack.Entry) bool {
	to, from := e.Original.Destination, e.Reply.Source.Port()
	vip := slices.ContainsFunc(cfg.VIPs, func(p netip.Prefix) bool { return p.Contains(to.Addr()) })
	return e.Original.Protocol == unix.IPPROTO_TCP && !e.Replied && vip && to.Port() != dnsPort && from != cfg.EgressPort && from != refusedPort
}

// isDNS reports whether an entry belongs to a flow of a protocol to port 53.
func isDNS(e conntrack.Entry, protocol uint8) bool {
	return e.Original.Protocol == protocol && e.Original.Destination.Port() == dnsPort
}

// leftover reports whether an entry has to be dropped some time after rules with a zone were installed. Such an
// entry is redirected and not in the zone, so it was made while table raw had no rules. The application no longer
// uses the entry, but a query of the agent from the same source port would. It can be dropped when no reply can be
// in flight.
func (s sweep) leftover(e conntrack.Entry) bool {
	return s.zone != 0 && e.Zone != s.zone && s.toAgent(e)
}

// orphan reports whether an entry has to be dropped after rules were removed. The entries of captured queries in the zone
// stay: no new query enters the zone, and a reply may be in flight. The entries of open TCP connections stay, too.
func (s sweep) orphan(e conntrack.Entry) bool {
	return s.redirected(e) && ended(e, true) || e.Zone == 0 && s.toAgent(e)
}

// toAgent reports whether an entry belongs to a UDP query that is redirected to the agent.
func (s sweep) toAgent(e conntrack.Entry) bool {
	return isDNS(e, unix.IPPROTO_UDP) && s.redirected(e)
}

// redirected reports whether an entry is redirected to the agent.
func (s sweep) redirected(e conntrack.Entry) bool {
	return slices.Contains(s.ports, e.Reply.Source.Port())
}

// inUse reports whether queries were captured recently. It returns true if the entries cannot be read.
func inUse(f family.Family, inKernel saved) bool {
	s := sweep{ports: inKernel.redirections()}
	captured, err := conntrack.List(f.Number(), func(e conntrack.Entry) bool {
		return e.Original.Destination.Port() == dnsPort && s.redirected(e)
	})
	return err != nil || len(captured) > 0
}
