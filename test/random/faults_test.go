package random

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// The groups of nameservers, which know different records. resolv.conf or --upstream name those of one of the first
// two; the third has the names below route.example at times.
const (
	groupA, groupB, routeGroup = 0, 1, 2
	neverFrom                  = -1
)

// A serverGroup is nameservers that know the same names, some of which have a fault at times.
type serverGroup struct {
	number  int
	servers []*fakedns.Server
	faults  []fault // of each

	mu     sync.Mutex
	states []groupState
}

// A groupState is which servers live from a time on, as bits, and which of these answer over TCP, too.
type groupState struct {
	at           time.Time
	alive, whole uint
}

type effects = []fakedns.Effect

// A fault is a way in which a nameserver behaves. One that lives answers a query in the end if it is asked again
// and again, within a second each time.
type fault struct {
	name         string
	alive, whole bool
	effects      effects
	rcode        int  // of all replies, unless it is zero
	plain        bool // an error if a query has an OPT record, and no OPT record in replies
	closed       bool
	noTCP        bool
}

// faults returns all faults. The first is none.
func faults(seed uint64) []fault {
	udp, tcp := fakedns.OnUDP, fakedns.OnTCP
	const ms = time.Millisecond
	return []fault{
		{name: "none", alive: true, whole: true},
		{name: "none", alive: true, whole: true},
		{name: "late by 80 ms", alive: true, whole: true, effects: effects{fakedns.Delay(80 * ms)}},
		{name: "late by up to a second", alive: true, effects: effects{fakedns.Jitter(1000*ms, seed)}},
		{name: "out of order", alive: true, whole: true, effects: effects{fakedns.Jitter(30*ms, seed)}},
		{name: "three times", alive: true, whole: true, effects: effects{udp(fakedns.Duplicate(3))}},
		{name: "a fifth lost", alive: true, effects: effects{udp(fakedns.Loss(0.2, seed))}},
		{name: "three fifths lost", effects: effects{udp(fakedns.Loss(0.6, seed))}},
		{name: "forged with another question", alive: true, whole: true, effects: effects{udp(fakedns.First(fakedns.WrongQuestion))}},
		{name: "noise first", alive: true, whole: true, effects: effects{udp(fakedns.First(fakedns.Raw(noise)))}},
		{name: "malformed", effects: effects{fakedns.Cut(3)}},
		{name: "sometimes malformed", effects: effects{fakedns.Sometimes(0.3, seed, fakedns.Cut(5))}},
		{name: "refuses", rcode: dns.RcodeRefused},
		{name: "fails", rcode: dns.RcodeServerFailure},
		{name: "does not implement", rcode: dns.RcodeNotImplemented},
		{name: "FORMERR", rcode: dns.RcodeFormatError},
		{name: "without EDNS", alive: true, whole: true, plain: true},
		{name: "silent", effects: effects{fakedns.Drop}},
		{name: "silent over UDP", effects: effects{udp(fakedns.Drop)}},
		{name: "silent over TCP", alive: true, effects: effects{tcp(fakedns.Drop)}},
		{name: "breaks connections", alive: true, effects: effects{tcp(fakedns.Break)}},
		{name: "refuses connections", alive: true, noTCP: true},
		{name: "closed", closed: true},
	}
}

// noise returns packets that are no response to a query.
func noise(query []byte) [][]byte { return [][]byte{query[:2], {}, query, query[:len(query)/2]} }

// startGroup starts nameservers at addresses of a block.
func startGroup(t *testing.T, number, servers int, block string) *serverGroup {
	t.Helper()
	g := &serverGroup{number: number}
	for i := range servers {
		on := fakedns.On(netip.MustParseAddrPort(fmt.Sprintf("%s%d:53", block, 10*number+i+1)))
		g.servers = append(g.servers, fakedns.Start(t, groupHandler(number), on, fakedns.Forget))
		g.faults = append(g.faults, faults(0)[0])
	}
	g.note()
	return g
}

// note notes which servers live.
func (g *serverGroup) note() {
	state := groupState{at: time.Now()}
	for i, f := range g.faults {
		if f.alive {
			state.alive |= 1 << i
		}
		if f.alive && f.whole {
			state.whole |= 1 << i
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.states = append(g.states, state)
}

// oneAnswers reports whether one server has lived at all times between two, over TCP too if that is needed. It is not
// enough that each time another one has, since a server that has failed for a question is not asked again (F3).
func (g *serverGroup) oneAnswers(from, until time.Time, tcp bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	servers := ^uint(0)
	for _, state := range slices.Backward(g.states) {
		if state.at.After(until) {
			continue
		}
		if servers &= state.alive; tcp {
			servers &= state.whole
		}
		if state.at.Before(from) {
			break
		}
	}
	return servers != 0
}

// othersLive reports whether a server other than one lives.
func (g *serverGroup) othersLive(server int) bool {
	for i, f := range g.faults {
		if i != server && f.alive {
			return true
		}
	}
	return false
}

// behave gives a server a fault.
func (g *serverGroup) behave(server int, next fault) error {
	previous := g.faults[server]
	restart := next.closed || previous.closed || next.noTCP || previous.noTCP
	// Until it is done, the server has the worse of both.
	during := next
	during.alive = next.alive && previous.alive && !restart
	during.whole = next.whole && previous.whole && !restart
	g.faults[server] = during
	g.note()
	s := g.servers[server]
	handler := groupHandler(g.number)
	if next.rcode != 0 {
		handler = failWith(next.rcode)
	}
	if next.plain {
		handler = withoutEDNS(handler)
	}
	s.Handle(handler, next.effects...)
	if restart {
		s.Close()
		option := fakedns.AllNetworks
		if next.noTCP {
			option = fakedns.NoTCP
		}
		if !next.closed {
			if err := s.Restart(option); err != nil {
				return err
			}
		}
	}
	g.faults[server] = next
	g.note()
	return nil
}

// failWith answers every query with a response code, and keeps its OPT record.
func failWith(rcode int) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetRcode(query, rcode)
		if opt := query.IsEdns0(); opt != nil {
			reply.SetEdns0(1232, opt.Do())
		}
		return reply
	}
}

// withoutEDNS answers as a server that does not know EDNS.
func withoutEDNS(handler fakedns.Handler) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		if query.IsEdns0() != nil {
			return new(dns.Msg).SetRcode(query, dns.RcodeFormatError)
		}
		return handler(query, network)
	}
}

// disturb lets servers of the group have faults, one after the other, until ctx ends; then none has. At least one
// lives, except for some seconds at times.
func (w *world) disturb(ctx context.Context, g *serverGroup, random *rand.Rand) {
	behave := func(server int, f fault) {
		w.note(fmt.Sprintf("server %d of group %d: %s", server, g.number, f.name))
		if err := g.behave(server, f); err != nil {
			w.tb.Errorf("a nameserver does not behave: %v", err)
		}
	}
	for pause(ctx, random, 50*time.Millisecond, 700*time.Millisecond) {
		all := faults(random.Uint64())
		server, next := random.IntN(len(g.servers)), all[random.IntN(len(all))]
		if random.IntN(80) == 0 {
			for i := range g.servers {
				behave(i, all[len(all)-1-5*random.IntN(2)]) // closed, or silent
			}
			pause(ctx, random, 300*time.Millisecond, 3*time.Second)
			behave(server, all[0])
			continue
		}
		if g.othersLive(server) {
			behave(server, next)
		}
	}
	for i := range g.servers {
		behave(i, faults(0)[0])
	}
}

// pause waits for a random time, and reports whether ctx has not ended before.
func pause(ctx context.Context, random *rand.Rand, shortest, longest time.Duration) bool {
	return clock.Sleep(ctx, shortest+time.Duration(random.Int64N(int64(longest-shortest))))
}
