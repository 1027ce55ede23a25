//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// The simulation asks virtual servers in virtual time, with the real Exchange.

// A behaviour tells what a virtual server does with a query at a time since the start:
// it replies with a response code after a delay, or not at all.
type behaviour func(random *rand.Rand, at time.Duration) (delay time.Duration, code int, lost bool)

// rtt is a server whose replies take about base. One in twenty takes much longer,
// since the server has to ask others first.
func rtt(base time.Duration) behaviour {
	return func(random *rand.Rand, _ time.Duration) (time.Duration, int, bool) {
		delay := base + time.Duration(random.ExpFloat64()*float64(base)/4)
		if random.IntN(20) == 0 {
			delay += 20*time.Millisecond + time.Duration(random.IntN(100))*time.Millisecond
		}
		return delay, dns.RcodeSuccess, false
	}
}

func lossy(b behaviour, share float64) behaviour {
	return func(random *rand.Rand, at time.Duration) (time.Duration, int, bool) {
		delay, code, lost := b(random, at)
		return delay, code, lost || random.Float64() < share
	}
}

func deadWhile(b behaviour, dead func(at time.Duration) bool) behaviour {
	return func(random *rand.Rand, at time.Duration) (time.Duration, int, bool) {
		delay, code, lost := b(random, at)
		return delay, code, lost || dead(at)
	}
}

func says(b behaviour, code int) behaviour {
	return func(random *rand.Rand, at time.Duration) (time.Duration, int, bool) {
		delay, _, lost := b(random, at)
		return delay, code, lost
	}
}

// A virtual server is a carrier.
type virtual struct {
	start time.Time

	mu      sync.Mutex
	does    behaviour
	names   func(packet []byte) bool // whether it answers a query; nil means all
	random  *rand.Rand
	queries int
}

func (v *virtual) receive() (delay time.Duration, code int, lost bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.queries++
	return v.does(v.random, time.Since(v.start))
}

func (v *virtual) sweep(time.Time)                {}
func (v *virtual) close()                         {}
func (v *virtual) retireFrom(netip.AddrPort) bool { return false }

func (v *virtual) send(a *attempt, packet []byte) {
	delay, code, lost := v.receive()
	if lost || bytes.Contains(packet, []byte(deadZone)) || v.names != nil && !v.names(packet) {
		time.AfterFunc(defaultTimeout, func() { a.end(nil, ErrTimeout) })
		return
	}
	reply := slices.Clone(packet)
	reply[2] |= wire.QR
	reply[3] |= byte(code)
	if code == dns.RcodeSuccess {
		reply[7] = 1 // number of answers
		end, _ := questionEnd(reply)
		reply = slices.Insert(reply, end, []byte("\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xc0\x00\x02\x01")...)
	}
	time.AfterFunc(delay, func() { a.end(reply, nil) })
}

// deadZone is a domain in wire form. No virtual server answers queries for its names, because
// it waits for nameservers that are dead.
const deadZone = "\x04dead\x07example"

// A strategy asks the servers until there is a usable reply or the time is up.
type strategy struct {
	name string
	ask  func(g *Group, random *rand.Rand) error

	options Options
}

// viaGroup asks as nametap does.
func viaGroup(g *Group, _ *rand.Rand) error {
	reply, _, err := g.Exchange(context.Background(), simQuery, UDPOnly)
	if err == nil && rcode(reply) != dns.RcodeSuccess {
		return errors.New("a failure")
	}
	return err
}

var strategies = []strategy{
	{name: "strict", ask: viaGroup},
	{name: "fastest", ask: viaGroup, options: Options{Fastest: true}},
	// One server at random, 5 s, then the next.
	{name: "random, 5 s", ask: func(g *Group, random *rand.Rand) error {
		first := random.IntN(len(g.servers))
		for i := range g.servers {
			if plainAsk(5*time.Second, g.servers[(first+i)%len(g.servers)]) {
				return nil
			}
		}
		return ErrTimeout
	}},
	{name: "all at once", ask: func(g *Group, _ *rand.Rand) error {
		if plainAsk(5*time.Second, g.servers...) {
			return nil
		}
		return ErrTimeout
	}},
}

var simQuery = binary.BigEndian.AppendUint32(append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0},
	"\x03www\x07example\x00"...), 1<<16|1)

// plainAsk asks servers at once and waits for the first usable reply.
func plainAsk(timeout time.Duration, servers ...*server) bool {
	replies := make(chan int, len(servers))
	for _, s := range servers {
		if delay, code, lost := s.udp.(*virtual).receive(); !lost {
			time.AfterFunc(delay, func() { replies <- code })
		}
	}
	end := time.NewTimer(timeout)
	defer end.Stop()
	for range servers {
		select {
		case code := <-replies:
			if code == dns.RcodeSuccess {
				return true
			}
		case <-end.C:
			return false
		}
	}
	return false
}

// A result is the result of a strategy in a scenario.
type result struct {
	times    []time.Duration // sorted
	failures int
	perQuery float64
	// Of queries asked after the scenario's mark:
	late     time.Duration // longest time
	lateFail int           // failures
}

func (r result) quantile(q float64) time.Duration { return r.times[int(q*float64(len(r.times)-1))] }

type scenario struct {
	name    string
	servers []behaviour
	mark    time.Duration
}

const (
	simQueries = 10_000
	simPause   = 10 * time.Millisecond // mean, between queries
)

// simulate asks 10,000 queries with a strategy, about a hundred a second.
func simulate(t *testing.T, sc scenario, st strategy) (r result) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		random := rand.New(rand.NewPCG(1, 2))
		start := time.Now()
		g, all := group(c, st.options, sc.servers...)
		type done struct {
			at, took time.Duration
			err      error
		}
		results := make(chan done, simQueries)
		for range simQueries {
			time.Sleep(time.Duration(random.ExpFloat64() * float64(simPause)))
			seed := random.Uint64()
			go func() {
				at := time.Since(start)
				err := st.ask(g, rand.New(rand.NewPCG(seed, 4)))
				results <- done{at, time.Since(start) - at, err}
			}()
		}
		for range simQueries {
			d := <-results
			r.times = append(r.times, d.took)
			if d.err != nil {
				r.failures++
			}
			if d.at >= sc.mark {
				r.late = max(r.late, d.took)
				if d.err != nil {
					r.lateFail++
				}
			}
		}
		time.Sleep(time.Minute) // the last replies
		sent := 0
		for _, v := range all {
			sent += v.queries
		}
		r.perQuery = float64(sent) / simQueries
	})
	slices.Sort(r.times)
	return r
}

// group returns a group of virtual servers.
func group(c *Client, options Options, does ...behaviour) (*Group, []*virtual) {
	var specs []Spec
	var all []*virtual
	for i, does := range does {
		spec := Spec{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 53)}
		v := &virtual{does: does, random: rand.New(rand.NewPCG(uint64(i), 3)), start: time.Now()}
		c.servers[spec] = &server{spec: spec, name: spec.String(), shared: &c.shared, udp: v, stream: v}
		specs, all = append(specs, spec), append(all, v)
	}
	return c.Group(specs, options), all
}

// F3, F4: the effect of the rules, compared with two simple strategies.
func TestSimulation(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	near, far := rtt(2*ms), rtt(5*ms)
	dead := func(b behaviour) behaviour {
		return deadWhile(b, func(at time.Duration) bool { return at > time.Second })
	}
	outage := func(at time.Duration) bool { return at > 10*time.Second && at < 40*time.Second }
	const back = 45 * time.Second // normal again after 5 s
	scenarios := []scenario{
		{"healthy", []behaviour{near, far}, 0},
		{"one server only", []behaviour{near}, 0},
		{"one slow (250 ms)", []behaviour{rtt(250 * ms), near}, time.Second},
		{"1 % lost", []behaviour{lossy(near, .01), lossy(far, .01)}, 0},
		{"5 % lost", []behaviour{lossy(near, .05), lossy(far, .05)}, 0},
		{"30 % lost", []behaviour{lossy(near, .3), lossy(far, .3)}, 0},
		{"30 % lost, one server", []behaviour{lossy(near, .3)}, 0},
		{"one dead", []behaviour{dead(near), far}, 2 * time.Second},
		{"one dead from the start", []behaviour{deadWhile(near, func(time.Duration) bool { return true }), far}, 0},
		{"flapping, 5 s", []behaviour{deadWhile(near, func(at time.Duration) bool { return at/(5*time.Second)%2 == 1 }), far}, 0},
		{"one REFUSED", []behaviour{says(near, dns.RcodeRefused), far}, 0},
		{"both dead for 30 s", []behaviour{deadWhile(near, outage), deadWhile(far, outage)}, back},
	}
	var table strings.Builder
	fmt.Fprintf(&table, "%-24s %-12s %9s %9s %9s %6s %12s\n", "", "", "p50", "p99", "max", "failed", "asked/query")
	results := map[string]result{} // of nametap's strategies, by order and scenario
	for _, sc := range scenarios {
		for _, st := range strategies {
			r := simulate(t, sc, st)
			fmt.Fprintf(&table, "%-24s %-12s %7.1fms %7.1fms %7.1fms %6d %12.3f\n", sc.name, st.name,
				millis(r.quantile(.5)), millis(r.quantile(.99)), millis(r.quantile(1)), r.failures, r.perQuery)
			if st.name == "strict" || st.name == "fastest" {
				results[st.name+": "+sc.name] = r
			}
		}
	}
	t.Log("\n" + table.String())
	for name, r := range results {
		if !strings.HasSuffix(name, "both dead for 30 s") && r.failures > 0 {
			t.Errorf("%s: %d queries of %d failed", name, r.failures, simQueries)
		}
		if r.quantile(1) > defaultTimeout+wheelTick {
			t.Errorf("%s: a query took %v", name, r.quantile(1))
		}
	}
	for _, order := range []string{"strict: ", "fastest: "} {
		for _, name := range []string{"healthy", "one server only", "one slow (250 ms)"} {
			if r := results[order+name]; r.perQuery > 1.04 && order+name != "strict: one slow (250 ms)" {
				t.Errorf("%s: %.3f queries sent for each", order+name, r.perQuery)
			}
		}
		for name, bound := range map[string]time.Duration{
			"30 % lost": 1200 * ms, "one dead": 300 * ms, "one dead from the start": 300 * ms,
			"flapping, 5 s": 300 * ms, "one slow (250 ms)": 300 * ms, "1 % lost": 300 * ms, "5 % lost": 300 * ms,
		} {
			if order+name == "strict: one slow (250 ms)" {
				bound = maxLate + 50*ms // the first server keeps its place, the second is a hedge
			}
			if p99 := results[order+name].quantile(.99); p99 > bound {
				t.Errorf("%s: p99 is %v, want %v at most", order+name, p99, bound)
			}
		}
		if r := results[order+"both dead for 30 s"]; r.late > maxLate || r.lateFail > 0 {
			t.Errorf("%s5 s after the servers are back: %d failed, one took %v", order, r.lateFail, r.late)
		}
	}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// F4: by time, a server that is not asked is measured by probes, and asked once it is among the fastest.
func TestFastestIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		const turn = time.Minute
		takes := func(before, after time.Duration) behaviour {
			return func(_ *rand.Rand, at time.Duration) (time.Duration, int, bool) {
				if at < turn {
					return before, dns.RcodeSuccess, false
				}
				return after, dns.RcodeSuccess, false
			}
		}
		g, all := group(c, Options{Fastest: true}, takes(100*time.Millisecond, time.Millisecond), takes(10*time.Millisecond, 10*time.Millisecond))
		for second := range 180 {
			_, from, err := g.Exchange(t.Context(), simQuery, UDPOnly)
			if want := g.servers[1].name; err != nil || (second > 0 && second < 60 && from != want) || (second > 120 && from == want) {
				t.Errorf("after %d s: answered by %v: %v", second, from, err)
			}
			time.Sleep(time.Second)
		}
		if before := all[0].queries - 60; before < 0 || before > 65 {
			t.Errorf("the first server got %d packets", all[0].queries)
		}
	})
}

// F6: a server that no longer loops is used again.
func TestLoopEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		g, all := group(c, Options{}, rtt(time.Millisecond))
		g.Suspect()
		for _, probe := range c.probes {
			name := []byte{2 * probeLen}
			name = hex.AppendEncode(name, probe.id[:])
			if !c.Echo(wire.Name(name)+loopSuffix(), Arrival{}) {
				t.Error("the probe is not recognised")
			}
		}
		for second := range 20 {
			_, _, err := g.Exchange(t.Context(), simQuery, UDPOnly)
			if loops := second <= 10; loops != errors.Is(err, ErrLoop) {
				t.Errorf("after %d s: %v", second, err)
			}
			time.Sleep(time.Second)
		}
		if all[0].queries != 1+1+9 { // two probes, and then queries
			t.Errorf("asked %d times", all[0].queries)
		}
	})
}

// F6: a server that is suspected all the time is probed at once, and then less and less
// often.
func TestSuspectedAllTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		g, all := group(c, Options{}, rtt(time.Millisecond))
		suspects := func(during time.Duration) (probes int) {
			before := all[0].queries
			for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				g.Suspect()
			}
			return all[0].queries - before
		}
		for _, step := range []struct {
			during time.Duration
			probes int
		}{{500 * time.Millisecond, 1}, {2 * time.Second, 1}, {time.Minute, 5}, {time.Hour, 56}} {
			if probes := suspects(step.during); probes < step.probes-1 || probes > step.probes+1 {
				t.Errorf("%d probes in %v, want %d", probes, step.during, step.probes)
			}
		}
		time.Sleep(probesForget + time.Second)
		if probes := suspects(500 * time.Millisecond); probes != 1 {
			t.Errorf("%d probes after a pause, want 1", probes)
		}
	})
}
