package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sort"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/iptables"
)

const (
	// wayInterval is how often the way of each family is probed. An answer renews the lease of the rules.
	wayInterval = iptables.LeaseTime / 4
	// wayTCP is how often the way to a nameserver is also probed over TCP.
	wayTCP = 8 * wayInterval
	// wayMisses is how many probes in a row must fail before queries to a nameserver pass through, which means that
	// they are no longer redirected. A repair of the rules causes further probes, so a failure does not count if it
	// comes less than wayMissPause after the previous failure that counted.
	wayMisses    = 3
	wayMissPause = wayInterval * 3 / 4
	// wayPatience is how long the lease is renewed after the last answer of a listener, while this process runs: queries
	// wait in the socket of a slow listener, as over a restart. So the capture ends 5 s after the last answer.
	wayPatience = 5*time.Second - iptables.LeaseTime
)

// ways probes the way that a client's query takes to each nameserver of resolv.conf: a probe has the route, the source
// address and the filters of a client's query, and passes the same rules. The agent's own queries are not redirected,
// so the probes have a hop limit that the first rule matches and redirects ([iptables.ProbeHops]).
//
// One nameserver of each family is probed at a time. If the probe is not answered, the other nameservers are probed
// without delay: any answer shows that the agent is alive. The lease of the rules is renewed at each answer, and every
// wayInterval until wayPatience after the last answer. Then the kernel ends the capture.
type ways struct {
	log         *slog.Logger
	clock       *clock.Clock // only for probes: on a shared clock, a poll that waits for a disk could delay them
	id          string       // the agent's answer for id.server
	targets     func(family.Family) []netip.Addr
	probeDirect func(ctx context.Context, f family.Family, network string) error // probes the listener without the rules
	isBarred    func() bool                                                      // reports whether a firewall drops all queries of the agent to nameservers
	renew       func(family.Family) (emptied bool, err error)
	drops       func() uint64   // returns how many queries the kernel has dropped because the queue of a listener was full
	onMiss      func()          // is called after the first failed probe in a row: the rules may be gone
	begun       <-chan struct{} // closed when the rules are first installed
	rules       <-chan struct{} // gets a value when the rules were installed or changed
	beforeRound func()          // is called before each round of probes
	// setPassing sets the destinations to which queries over a family pass through. It is called when the destinations
	// may have changed.
	setPassing func(family.Family, []netip.Prefix)

	known   map[netip.Addr]*way
	results chan probed
	answers chan family.Family // the families whose listeners have answered
	leases  map[family.Family]*leaseState
	looked  time.Time // when the leases were last looked at
	lapses  lapses
	status  atomic.Pointer[[]Way]
	alive   chan struct{} // closed when a lease was renewed after the rules were installed
}

// A Way is the way of clients' queries to a nameserver.
type Way struct {
	Nameserver netip.Addr `json:"nameserver"`
	State      WayState   `json:"state"`
	// Detail says why the state is not [WayReached].
	Detail string `json:"detail,omitempty"`
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

// A leaseState is what is known of the lease of a family.
type leaseState struct {
	answered time.Time // when a listener last answered; zero before the first answer and after wayPatience
	drops    uint64    // the drops when a probe first failed after that
	failure  logonce.Failure
}

// A way is the state of the way to one nameserver.
type way struct {
	Way
	misses   int       // failed probes in a row
	lastMiss time.Time // when the last failure was counted
	probing  bool      // whether a probe is in flight
	last     time.Time // when the last probe was sent
	tcp      time.Time // when the last probe over TCP was sent
}

// passes reports whether queries to the nameserver pass through.
func (w *way) passes() bool { return w.State == WayBroken || w.State == WayBarred }

// probed is the result of a probe.
type probed struct {
	nameserver netip.Addr
	state      WayState
	err        error
}

// run probes until ctx ends. If installed is true, rules of the previous agent are already installed, and the first
// probe is sent at once. Otherwise run waits until the rules are installed.
func (w *ways) run(ctx context.Context, installed bool) {
	w.known, w.results, w.answers = make(map[netip.Addr]*way), make(chan probed), make(chan family.Family)
	w.leases, w.looked = map[family.Family]*leaseState{family.IPv4: {}, family.IPv6: {}}, time.Now()
	begun := w.begun
	due, stop := w.clock.Poll(wayInterval, func() bool { return true })
	defer stop()
	for {
		w.beforeRound()
		w.noteStandstill()
		for _, f := range family.All() {
			w.renewLease(f)
			if installed {
				w.next(ctx, f)
			}
		}
		for waiting := true; waiting; {
			select {
			case r := <-w.results:
				w.record(ctx, r)
			case f := <-w.answers:
				w.noteStandstill()
				w.leases[f].answered = time.Now()
				w.renewLease(f)
			case <-due:
				waiting = false
			case <-begun:
				waiting, begun, installed = false, nil, true
			case <-w.rules:
				waiting = false
			case <-ctx.Done():
				w.drain()
				return
			}
		}
	}
}

// drain receives the results of the probes in flight. Then the goroutines of these probes end.
func (w *ways) drain() {
	for _, way := range w.known {
		if way.probing {
			<-w.results
		}
	}
}

// next probes the nameserver of family f whose last probe was the longest ago. It forgets nameservers that resolv.conf
// no longer has.
func (w *ways) next(ctx context.Context, f family.Family) {
	targets := w.targets(f)
	for addr, known := range w.known {
		if family.Of(addr) == f && !known.probing && !slices.Contains(targets, addr) {
			delete(w.known, addr)
			if known.passes() {
				w.updatePassing(f)
			}
		}
	}
	for _, addr := range targets {
		if w.known[addr] == nil {
			w.known[addr] = &way{Way: Way{Nameserver: addr, State: WayUnknown}}
		}
	}
	ready := slices.DeleteFunc(slices.Clone(targets), func(a netip.Addr) bool { return w.known[a].probing })
	if len(ready) == 0 {
		return
	}
	w.probe(ctx, slices.MinFunc(ready, func(a, b netip.Addr) int { return w.known[a].last.Compare(w.known[b].last) }))
}

// probe probes the way to a nameserver in another goroutine. It probes over UDP. At intervals of wayTCP it also probes
// over TCP, because a firewall may drop only queries over TCP. While probes fail, each probe is over UDP and TCP.
func (w *ways) probe(ctx context.Context, nameserver netip.Addr) {
	known := w.known[nameserver]
	now := time.Now()
	known.probing, known.last = true, now
	networks := []string{"udp"}
	if known.misses > 0 || now.Sub(known.tcp) >= wayTCP {
		known.tcp = now
		networks = append(networks, "tcp")
	}
	go func() {
		r := probed{nameserver: nameserver}
		f := family.Of(nameserver)
		for _, network := range networks {
			before := r
			r.state, r.err = w.ask(ctx, network, nameserver)
			if r.state == WayReached {
				w.noteAnswer(ctx, f)
				continue
			}
			silent := w.probeDirect(ctx, f, network)
			if silent == nil && r.state != WayBroken {
				w.noteAnswer(ctx, f)
			}
			switch {
			case network == "tcp" && r.state == WayUnknown:
				r = before
			case noRoute(silent):
				r.state, r.err = WayUnknown, silent
			case silent == nil || r.state != WayBroken || errors.Is(silent, unix.EPERM): // EPERM: a firewall drops the direct probe, too
			case network == "tcp": // the agent accepts no connection, so only the result over UDP counts
				r = before
			default:
				r.state, r.err = WaySilent, silent
			}
			break
		}
		if r.state == WayReached && w.isBarred() {
			r.state, r.err = probeForwarding(ctx, nameserver)
		}
		w.results <- r
	}()
}

// noteAnswer passes an answer of a listener to the method run.
func (w *ways) noteAnswer(ctx context.Context, f family.Family) {
	select {
	case w.answers <- f:
	case <-ctx.Done():
	}
}

// ask sends a probe to a nameserver as a client would, and returns the state that the answer shows.
func (w *ways) ask(ctx context.Context, network string, nameserver netip.Addr) (WayState, error) {
	to := netip.AddrPortFrom(nameserver, 53).String()
	text, err := ask(ctx, question{
		description: "probing the way to " + to + " over " + network, network: network, to: to, name: askID, hops: iptables.ProbeHops,
	})
	switch {
	case network == "udp" && undialled(err), err != nil && ctx.Err() != nil,
		isAny(err, unix.EADDRNOTAVAIL, unix.EAGAIN, unix.EMFILE, unix.ENFILE): // any client can use up all source ports
		return WayUnknown, err
	case err != nil:
		return WayBroken, err
	case text != w.id:
		return WayElsewhere, errors.New("another server answers the probe over " + network + ": a rule before the rules of nametap sends it there, or changes its TTL")
	}
	return WayReached, nil
}

// probeForwarding sends a query to a nameserver as the agent forwards queries. It returns [WayBarred] if a
// firewall of this host drops the query, and otherwise [WayReached], whether or not there is a reply.
func probeForwarding(ctx context.Context, nameserver netip.Addr) (WayState, error) {
	_, err := ask(ctx, question{description: "querying a nameserver", network: "udp", to: netip.AddrPortFrom(nameserver, 53).String(),
		name: askID, hops: queryHops, limit: probeRetry})
	if errors.Is(err, unix.EPERM) {
		return WayBarred, err
	}
	return WayReached, nil
}

// undialled reports whether err means that a UDP socket has no route to a server. A firewall that rejects packets causes
// the same error codes on sockets that have a route, but not when they are dialled.
func undialled(err error) bool {
	op := new(net.OpError)
	return errors.As(err, &op) && op.Op == "dial" && noRoute(err)
}

// record records the result of a probe. It logs a new state and changes which queries pass through. After a failure
// it probes the other nameservers.
func (w *ways) record(ctx context.Context, r probed) {
	known, f := w.known[r.nameserver], family.Of(r.nameserver)
	known.probing = false
	if ctx.Err() != nil {
		return
	}
	before := known.State
	if r.state == WayReached {
		known.misses = 0
	} else if now := time.Now(); known.misses == 0 || now.Sub(known.lastMiss) >= wayMissPause {
		known.misses, known.lastMiss = known.misses+1, now
		if known.misses == 1 {
			w.leases[f].drops = w.drops()
			w.onMiss()
		}
	}
	if r.state == WayReached || known.misses >= wayMisses {
		known.State, known.Detail = r.state, ""
		if r.err != nil {
			known.Detail = r.err.Error()
		}
	}
	if known.State != before {
		w.logState(known)
		w.updatePassing(f)
	}
	w.publish()
	if r.state != WayReached && known.misses <= wayMisses {
		for _, addr := range w.targets(f) {
			if other := w.known[addr]; other != nil && !other.probing && time.Since(other.last) >= wayInterval/2 {
				w.probe(ctx, addr)
			}
		}
	}
}

// renewLease renews the lease of family f if a listener has answered within wayPatience. Otherwise it notes why none has.
func (w *ways) renewLease(f family.Family) {
	lease := w.leases[f]
	switch {
	case lease.answered.IsZero():
		return
	case time.Since(lease.answered) > wayPatience:
		lease.answered = time.Time{}
		if w.drops() > lease.drops {
			w.lapses.add(LapseQueue)
		} else {
			w.lapses.add(LapseSilent)
		}
		return
	}
	emptied, err := w.renew(f)
	if emptied {
		w.lapses.add(LapseEmptied)
	}
	if lease.failure.Differs(err) {
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
	for _, lease := range w.leases {
		if !lease.answered.IsZero() {
			ended, lease.answered = true, lease.answered.Add(stood)
		}
	}
	if ended {
		w.lapses.add(LapseStandstill)
	}
}

// subject returns the nameserver of a way as an attribute for the log. If resolv.conf has no nameserver of a family, probes
// go to its loopback address, which stands for all servers.
func (w Way) subject() slog.Attr {
	if f := family.Of(w.Nameserver); w.Nameserver == f.Loopback() {
		return slog.String("nameserver", "any over "+f.String())
	}
	return slog.Any("nameserver", w.Nameserver)
}

// logState logs the new state of a way.
func (w *ways) logState(known *way) {
	text := map[WayState]string{
		WayReached:   "queries of clients to a nameserver reach the agent",
		WayBroken:    "queries of clients to a nameserver do not reach the agent, although it answers. They go to the nameserver itself until the agent is reached again. A firewall of this host may drop them after the redirection, or another program may remove the capture rules again and again; `nametap capture check` lists what to look at",
		WayBarred:    "a firewall of this host drops the queries that the agent forwards to nameservers. Queries of clients go to the nameserver itself until the agent may query it; allow it for the agent's user",
		WayElsewhere: "cannot check whether queries of clients reach the agent",
		WaySilent:    "the agent does not answer its own probes",
	}[known.State]
	switch {
	case text == "":
	case known.State == WayReached:
		w.log.Info(text, known.subject())
	default:
		w.log.Warn(text, known.subject(), slog.String("error", known.Detail))
	}
}

// updatePassing lets queries pass through to the nameservers of family f whose ways are broken or barred. If all ways
// of the family are broken or barred, it lets all queries of the family pass through.
func (w *ways) updatePassing(f family.Family) {
	targets := w.targets(f)
	var broken []netip.Prefix
	for _, addr := range targets {
		if known := w.known[addr]; known != nil && known.passes() {
			broken = append(broken, netip.PrefixFrom(addr, addr.BitLen()))
		}
	}
	if len(broken) > 0 && len(broken) == len(targets) {
		broken = []netip.Prefix{netip.PrefixFrom(f.Loopback(), 0).Masked()}
	}
	w.setPassing(f, broken)
}

// publish makes the states visible to other goroutines.
func (w *ways) publish() {
	all := make([]Way, 0, len(w.known))
	for _, known := range w.known {
		all = append(all, known.Way)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Nameserver.Less(all[j].Nameserver) })
	w.status.Store(&all)
}

// states returns the states of all ways, by nameserver.
func (w *ways) states() []Way {
	if all := w.status.Load(); all != nil {
		return *all
	}
	return nil
}
