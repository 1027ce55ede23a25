package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/iptables"
)

const (
	// wayInterval is how often the way of each family is probed. An answer renews the lease of the rules.
	wayInterval = iptables.LeaseTime / 4
	// In one of wayTCP intervals the way to each nameserver is also probed over TCP.
	wayTCP = 8
	// wayMisses is how many probes in a row must fail before queries to a nameserver are no longer redirected.
	wayMisses = 3
	// wayLooks is after how many failed probes in a row the rules are looked at: a program may change them in steps.
	wayLooks = 20
	// wayPatience is how long the lease is renewed after the last answer of a listener, while this process runs: queries
	// wait in the socket of a slow listener, as over a restart. So the capture ends 5 s after the last answer.
	wayPatience = 5*time.Second - iptables.LeaseTime
)

// ways probes the way that a client's query takes to each nameserver of resolv.conf: a probe has the route, the source
// address and the filters of a client's query, and passes the same rules. The agent's own queries are not redirected,
// so the probes have a hop limit that the first rule matches and redirects ([iptables.ProbeHops]).
//
// One nameserver of each family is probed at a time; after a miss, all are. The lease of the rules is renewed at each
// answer, and every wayInterval until wayPatience after the last answer. Then the kernel ends the capture.
type ways struct {
	log         *slog.Logger
	clock       *clock.Clock // only for probes: on a shared clock, a poll that waits for a disk could delay them
	id          string       // the agent's ID
	targets     func(family.Family) []netip.Addr
	direct      func(ctx context.Context, f family.Family, network string) probe.Result // probes the listener without the rules
	isBarred    func() bool                                                             // reports whether a firewall drops all queries of the agent to nameservers
	renew       func(family.Family) error
	onMiss      func()          // is called after failed probes: the rules may be gone
	begun       <-chan struct{} // closed when the rules are first installed
	rules       <-chan struct{} // gets a value when the rules were installed or changed
	beforeRound func()          // is called before each round of probes
	setPassing  func(map[family.Family][]netip.Prefix)

	known    map[netip.Addr]*way
	families map[family.Family]*probedFamily
	passing  map[family.Family][]netip.Prefix // the last that was passed to setPassing
	results  chan []Way
	probing  sync.WaitGroup
	looked   time.Time // when the leases were last looked at
	lapses   lapses
	status   atomic.Pointer[[]Way]
	alive    chan struct{} // closed when a lease was renewed after the rules were installed
}

// A Way is the way of clients' queries to a nameserver.
type Way struct {
	Nameserver netip.Addr `json:"nameserver"`
	State      WayState   `json:"state"`
	// Detail says why the state is not [WayReached].
	Detail   string    `json:"detail,omitempty"`
	answered time.Time // when a listener has answered a probe of this way, or the direct probe after it
}

// WayState says where queries of clients to a nameserver go, according to the last probes.
type WayState string

// The states of a way.
const (
	WayUnknown   WayState = "unknown"   // not probed yet, or the host lacks a route or the address of the agent
	WayReached   WayState = "reached"   // the agent answers the queries
	WayElsewhere WayState = "elsewhere" // another server answers the probe, so the probe is not redirected to the agent
	WayBroken    WayState = "broken"    // the agent answers, but redirected queries do not reach it; they now go to the nameserver
	WayBarred    WayState = "barred"    // a firewall drops the agent's own queries; those of clients now go to the nameserver
	WaySilent    WayState = "silent"    // the agent does not answer at all
)

// A way is the state of the way to one nameserver.
type way struct {
	Way
	misses int // failed probes in a row
}

// A probedFamily is what is known of a family and its lease.
type probedFamily struct {
	probing  bool      // whether probes are in flight
	turn     int       // counts the intervals with probes
	answered time.Time // when a listener last answered; zero before the first answer and after wayPatience
	failure  logonce.Failure
}

// standIn returns the address that is probed for all servers of a family of which resolv.conf names none. A packet to it
// takes the way of a client's query off this host, and no host has it (RFC 5737, RFC 6666).
func standIn(f family.Family) netip.Addr {
	if f == family.IPv4 {
		return netip.AddrFrom4([4]byte{192, 0, 2, 53})
	}
	return netip.AddrFrom16([16]byte{0: 1, 15: 0x53})
}

// Subject returns the nameserver of the way, or the servers that it stands for.
func (w Way) Subject() string {
	if f := family.Of(w.Nameserver); w.Nameserver == standIn(f) {
		return "any over " + f.String()
	}
	return w.Nameserver.String()
}

// run probes until ctx ends. If installed is true, rules of the previous agent are already installed, and the first
// probe is sent at once. Otherwise run waits until the rules are installed.
func (w *ways) run(ctx context.Context, installed bool) {
	w.known, w.results, w.looked = make(map[netip.Addr]*way), make(chan []Way), time.Now()
	w.families = map[family.Family]*probedFamily{family.IPv4: {}, family.IPv6: {}}
	begun := w.begun
	due, stop := w.clock.Poll(wayInterval, func() bool { return true })
	defer stop()
	defer w.probing.Wait()
	for probes := true; ; {
		if probes {
			w.beforeRound()
		}
		w.noteStandstill()
		for _, f := range family.All() {
			w.renewLease(f)
			if probes && installed {
				w.probe(ctx, f)
			}
		}
		probes = false
		select {
		case found := <-w.results:
			if ctx.Err() == nil {
				w.record(found)
			}
		case <-due:
			probes = true
		case <-begun:
			begun, installed, probes = nil, true, true
		case <-w.rules: // the lease of new rules begins with a renewal
		case <-ctx.Done():
			return
		}
	}
}

// probe probes ways of family f in other goroutines, unless it still does: the way to the nameserver whose turn it is, or
// all after a miss. A firewall may drop only queries over TCP.
func (w *ways) probe(ctx context.Context, f family.Family) {
	state := w.families[f]
	if state.probing {
		return
	}
	targets, missed := w.targets(f), false
	maps.DeleteFunc(w.known, func(addr netip.Addr, _ *way) bool { return family.Of(addr) == f && !slices.Contains(targets, addr) })
	for _, addr := range targets {
		if w.known[addr] == nil {
			w.known[addr] = &way{Way: Way{Nameserver: addr, State: WayUnknown}}
		}
		missed = missed || w.known[addr].misses > 0
	}
	w.publish()
	if len(targets) == 0 {
		return
	}
	networks, turn := []string{"udp"}, state.turn
	state.probing, state.turn = true, turn+1
	if missed || turn%wayTCP < len(targets) {
		networks = append(networks, "tcp")
	}
	if !missed {
		targets = targets[turn%len(targets):][:1]
	}
	w.probing.Go(func() {
		found := make([]Way, len(targets))
		var asking sync.WaitGroup
		for i, nameserver := range targets {
			asking.Go(func() { found[i] = w.ask(ctx, nameserver, networks) })
		}
		asking.Wait()
		select {
		case w.results <- found:
		case <-ctx.Done():
		}
	})
}

// ask probes the way to a nameserver over the networks, one after the other, and the listener itself if the agent is not
// reached. While a firewall may bar the agent, it also sends a query as the agent forwards queries.
func (w *ways) ask(ctx context.Context, nameserver netip.Addr, networks []string) Way {
	found, f := Way{Nameserver: nameserver, State: WayReached}, family.Of(nameserver)
	q := probe.Query{To: netip.AddrPortFrom(nameserver, 53).String(), ID: w.id, Hops: iptables.ProbeHops}
	for _, network := range networks {
		q.Network = network
		result, direct := q.Ask(ctx), probe.Result{}
		if result.State != probe.Agent {
			direct = w.direct(ctx, f, network)
		}
		state := stateOf(result, direct)
		if state == WayReached || direct.Answered() && state != WayBroken {
			found.answered = time.Now()
		}
		switch {
		case state == WayReached, network == "tcp" && state == WayUnknown: // no free port
		case network == "tcp" && state == WaySilent: // no connection is accepted, or a rule before nametap's drops it
			w.onMiss()
		case state == WaySilent:
			found.State, found.Detail = state, direct.Error
			return found
		default:
			found.State, found.Detail = state, result.Err().Error()
			return found
		}
	}
	if w.isBarred() {
		q.Network, q.ID, q.Hops, q.Limit = "udp", "", queryHops, probe.Repeat
		if r := q.Ask(ctx); r.State == probe.Barred {
			found.State, found.Detail = WayBarred, r.Err().Error()
		}
	}
	return found
}

// stateOf returns the state that a probe shows. If it has not reached the agent, direct is that of the listener.
func stateOf(result, direct probe.Result) WayState {
	switch {
	case result.State == probe.Agent:
		return WayReached
	case direct.State == probe.Absent, result.State == probe.Absent, result.State == probe.Unsent:
		return WayUnknown
	case result.State == probe.Other:
		return WayElsewhere
	case direct.Answered(), direct.State == probe.Barred: // a firewall may drop the direct probe, too
		return WayBroken
	}
	return WaySilent
}

// record records the results of the probes of a family. It logs new states.
func (w *ways) record(found []Way) {
	state := w.families[family.Of(found[0].Nameserver)]
	state.probing = false
	for _, r := range found {
		known := w.known[r.Nameserver]
		if r.answered.After(state.answered) {
			state.answered = r.answered
		}
		if known.misses++; r.State == WayReached {
			known.misses = 0
		}
		if known.misses > 0 && known.misses <= wayLooks && r.State != WayUnknown {
			w.onMiss()
		}
		if known.misses == 0 || known.misses >= wayMisses {
			if r.State != known.State {
				w.logState(r)
			}
			known.Way = r
		}
	}
	w.publish()
}

// renewLease renews the lease of family f if a listener has answered within wayPatience. Otherwise it notes why none has.
func (w *ways) renewLease(f family.Family) {
	state := w.families[f]
	switch {
	case state.answered.IsZero():
		return
	case time.Since(state.answered) > wayPatience:
		state.answered = time.Time{}
		w.lapses.add(LapseSilent)
		return
	}
	err := w.renew(f)
	if state.failure.Differs(err) {
		w.log.Error("DNS over one family is not captured: its rules cannot be kept alive", "family", f, "error", err)
	}
	if err == nil && chans.Closed(w.begun) && !chans.Closed(w.alive) {
		close(w.alive)
	}
}

// noteStandstill notes if this process has not run, so that leases have ended. That time is no silence of a listener.
func (w *ways) noteStandstill() {
	stood := time.Since(w.looked)
	w.looked = w.looked.Add(stood)
	if stood < iptables.LeaseTime {
		return
	}
	ended := false
	for _, state := range w.families {
		if !state.answered.IsZero() {
			ended, state.answered = true, state.answered.Add(stood)
		}
	}
	if ended {
		w.lapses.add(LapseStandstill)
	}
}

// logState logs the new state of a way.
func (w *ways) logState(way Way) {
	switch p := wayText(way.State); {
	case way.State == WayReached:
		w.log.Info("queries of clients to a nameserver reach the agent", "nameserver", way.Subject())
	case p.What != "":
		w.log.Warn(fmt.Sprintf(p.What, "a nameserver"), "nameserver", way.Subject(), "error", way.Detail, "effect", p.Effect, "mend", p.Mend)
	}
}

// publish makes the states visible to other goroutines, and changes which queries pass through.
func (w *ways) publish() {
	all := make([]Way, 0, len(w.known))
	for _, known := range w.known {
		all = append(all, known.Way)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Nameserver.Less(all[j].Nameserver) })
	if pass := passing(all); !maps.EqualFunc(pass, w.passing, slices.Equal) {
		w.passing = pass
		w.setPassing(pass)
	}
	all = slices.DeleteFunc(all, func(way Way) bool { // a stand-in to which the host has no route stands for no server
		return way.State == WayUnknown && way.Nameserver == standIn(family.Of(way.Nameserver))
	})
	w.status.Store(&all)
}

// passing returns the destinations to which queries pass through: the nameservers whose ways are broken or barred. If all
// ways of a family are, these are all servers of the family, and of the other one if no way of that is known.
func passing(ways []Way) map[family.Family][]netip.Prefix {
	pass, others, known := map[family.Family][]netip.Prefix{}, map[family.Family]int{}, map[family.Family]bool{}
	for _, way := range ways {
		f := family.Of(way.Nameserver)
		known[f] = known[f] || way.State != WayUnknown
		if way.State == WayBroken || way.State == WayBarred {
			pass[f] = append(pass[f], netip.PrefixFrom(way.Nameserver, way.Nameserver.BitLen()))
		} else {
			others[f]++
		}
	}
	for _, f := range family.All() {
		if len(pass[f]) > 0 && others[f] == 0 {
			for _, g := range family.All() {
				if g == f || !known[g] {
					pass[g] = []netip.Prefix{netip.PrefixFrom(g.Loopback(), 0).Masked()}
				}
			}
		}
	}
	return pass
}

// states returns the states of all ways, by nameserver.
func (w *ways) states() []Way { return *w.status.Load() }
