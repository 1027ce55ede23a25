//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// F3, F4, F16: while queries for names whose own servers are silent are in flight, other names
// neither fail nor wait, and the servers stay up and in their order.
func TestDeadZone(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	steady := func(rtt time.Duration) behaviour {
		return func(*rand.Rand, time.Duration) (time.Duration, int, bool) { return rtt, dns.RcodeSuccess, false }
	}
	for _, rate := range []int{10, 100, 1000} {
		synctest.Test(t, func(t *testing.T) {
			c := NewClient(Config{})
			defer c.Close()
			g, all := group(c, Options{}, steady(2*ms), steady(20*ms))
			ctx, stop := context.WithCancel(t.Context())
			var asking sync.WaitGroup
			asking.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					asking.Go(func() {
						if _, _, err := g.Exchange(ctx, deadQuery(i), UDPOnly); err == nil || errors.Is(err, ErrSilent) {
							t.Errorf("a name of the dead zone: %v", err)
						}
					})
					time.Sleep(time.Second / time.Duration(rate))
				}
			})
			time.Sleep(5 * time.Second)
			for range 100 {
				began := time.Now()
				_, from, err := g.Exchange(ctx, simQuery, UDPOnly)
				if took := time.Since(began); err != nil || from != g.servers[0].name || took > 20*ms {
					t.Errorf("beside %d queries a second: %v from %v after %v", rate, err, from, took)
				}
				time.Sleep(70 * ms)
			}
			for _, status := range c.Status() {
				if status.State != Up {
					t.Errorf("beside %d queries a second: %v is %v", rate, status.Spec, status.State)
				}
			}
			stop()
			asking.Wait()
			if most := rate * 12 * 3; all[0].queries > most+1000 {
				t.Errorf("%d queries a second: %d were sent, want %d at most", rate, all[0].queries, most)
			}
			time.Sleep(time.Minute) // the last replies
		})
	}
}

// F16: a server that lives and answers one of the probes' questions only, whichever it is, keeps its place while
// queries for a dead zone are in flight.
func TestDeadZoneAndOneProbe(t *testing.T) {
	t.Parallel()
	www := simQuery[wire.HeaderLen:]
	for asks := probeID; asks <= probeKnown; asks++ {
		synctest.Test(t, func(t *testing.T) {
			c := NewClient(Config{})
			defer c.Close()
			steady := func(*rand.Rand, time.Duration) (time.Duration, int, bool) {
				return time.Millisecond, dns.RcodeSuccess, false
			}
			g, all := group(c, Options{}, steady, steady)
			all[0].names = func(packet []byte) bool {
				return bytes.Contains(packet, asks.question(www)) || bytes.Contains(packet, []byte("\x05other"))
			}
			if asks == probeKnown {
				if _, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); err != nil {
					t.Fatal(err)
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			var asking sync.WaitGroup
			asking.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					asking.Go(func() { _, _, _ = g.Exchange(ctx, deadQuery(i), UDPOnly) })
					time.Sleep(20 * time.Millisecond)
				}
			})
			time.Sleep(3 * time.Second)
			other := wire.NewQuery(wire.AppendQuestion(nil, "\x05other\x07example", dns.TypeNS, dns.ClassINET))
			for range 1000 {
				if st := g.servers[0].standing(time.Now()); !st.lives() {
					t.Errorf("it answers probe %d only: %+v", asks, st)
				}
				if asks != probeKnown { // an answer would replace the known question
					if _, _, err := g.Exchange(t.Context(), other, UDPOnly); err != nil {
						t.Error(err)
					}
				}
				time.Sleep(7 * time.Millisecond)
			}
			stop()
			asking.Wait()
			time.Sleep(time.Minute) // the last replies
		})
	}
}

// F4, F16: on a path that loses one packet in a hundred, a server that is first in the order keeps its place while
// queries for a dead zone are in flight: a lost probe does not give its names to the next server.
func TestLossKeepsOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		g, _ := group(c, Options{}, lossy(rtt(2*time.Millisecond), .01), says(rtt(time.Millisecond), dns.RcodeNameError))
		ctx, stop := context.WithCancel(t.Context())
		var asking sync.WaitGroup
		asking.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				asking.Go(func() { _, _, _ = g.Exchange(ctx, deadQuery(i), UDPOnly) })
				time.Sleep(100 * time.Millisecond)
			}
		})
		time.Sleep(5 * time.Second)
		wrong := 0
		for range 50_000 {
			if reply, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); err != nil || rcode(reply) != dns.RcodeSuccess {
				wrong++
			}
			time.Sleep(20 * time.Millisecond)
		}
		if wrong > 2 {
			t.Errorf("%d queries of 50,000 have the answer of the second server", wrong)
		}
		stop()
		asking.Wait()
		time.Sleep(time.Minute) // the last replies
	})
}

// deadQuery returns a query for a name of the dead zone.
func deadQuery(i int) []byte {
	query := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, 5)
	query = fmt.Appendf(query, "%05d", i%100_000)
	return wire.AppendQuestion(query, deadZone, dns.TypeA, dns.ClassINET)
}

// F3, F16: a server that lives and leaves all names unanswered, such as a forwarder that
// cannot reach its own servers, stays up and first in the order. Each name is asked of the next
// one, too, as soon as the first is late.
func TestServerWithoutAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		g, all := group(c, Options{}, rtt(time.Millisecond), rtt(5*time.Millisecond))
		all[0].names = func(packet []byte) bool { return bytes.Contains(packet, probeLocal.question(nil)) }
		var slow int
		for range 1000 {
			began := time.Now()
			if answer, err := g.Ask(t.Context(), simQuery, UDPOnly); err != nil || !answer.Provisional {
				t.Fatalf("%+v, %v", answer, err)
			}
			if time.Since(began) > maxLate+50*time.Millisecond {
				slow++
			}
			time.Sleep(10 * time.Millisecond)
		}
		if slow > 100 { // the second server is slow for some names
			t.Errorf("%d queries of 1000 waited for long for the server that answers none", slow)
		}
		if status := c.Status()[0]; status.State != Up {
			t.Errorf("it is %v", status.State)
		}
		time.Sleep(time.Minute) // the last replies
	})
}

// F10, F16: while all servers are dead most queries fail at once, and some are
// sent. Soon after a server is back, none fails.
func TestOverloadEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		const outage, found = 20 * time.Second, 300 * time.Millisecond // by a probe
		dead := func(at time.Duration) bool { return at < outage }
		g, all := group(c, Options{}, deadWhile(rtt(time.Millisecond), dead), deadWhile(rtt(time.Millisecond), dead))
		var mu sync.Mutex
		refused := map[bool]int{} // by whether the servers were found to be back
		var asking sync.WaitGroup
		start, before := time.Now(), 0
		for i := range 25_000 {
			asking.Go(func() {
				back := time.Since(start) > outage+found
				_, _, err := g.Exchange(t.Context(), simQuery, UDPOnly)
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, ErrSilent) {
					refused[back]++
				}
				if back && err != nil {
					t.Errorf("query %d, with the servers back: %v", i, err)
				}
			})
			time.Sleep(time.Millisecond)
			switch i {
			case 10_000:
				before = all[0].asked()
			case 15_000:
				if sent := all[0].asked() - before; sent < 30 {
					t.Errorf("%d queries were sent in 5 s of overload", sent)
				}
			}
		}
		asking.Wait()
		if refused[false] < 15_000 {
			t.Errorf("%d queries of 20,000 were refused at once", refused[false])
		}
		time.Sleep(time.Minute) // the last replies
	})
}

// F16: when the only nameserver pauses for less than a second, at the start or later, no query
// is refused, although thousands wait for it.
func TestPauseRefusesNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		paused := func(at time.Duration) bool { return at%(5*time.Second) < 900*time.Millisecond }
		g, _ := group(c, Options{}, deadWhile(rtt(time.Millisecond), paused))
		var asking sync.WaitGroup
		for i := range 20_000 {
			asking.Go(func() {
				if _, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); err != nil {
					t.Errorf("query %d: %v", i, err)
				}
			})
			time.Sleep(500 * time.Microsecond)
		}
		asking.Wait()
		time.Sleep(time.Minute) // the last replies
	})
}

// asked returns how many queries the server was sent.
func (v *virtual) asked() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.queries
}

// F4: once the first server is back, a query after a minute probes it, and the next one gets its
// answer, although the second server says NXDOMAIN. While the first one is away few queries wait
// for it.
func TestOrderFirstIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		away := func(at time.Duration) bool { return at > time.Second && at < 20*time.Second }
		g, _ := group(c, Options{}, deadWhile(rtt(2*time.Millisecond), away), says(rtt(time.Millisecond), dns.RcodeNameError))
		slow := 0
		ask := func(want int) {
			t.Helper()
			began := time.Now()
			reply, _, err := g.Exchange(t.Context(), simQuery, UDPOnly)
			if err != nil || rcode(reply) != want {
				t.Errorf("want response code %d: %v, %v", want, reply, err)
			}
			if time.Since(began) > 20*time.Millisecond {
				slow++
			}
		}
		ask(dns.RcodeSuccess)
		time.Sleep(2 * time.Second)
		for range 100 {
			ask(dns.RcodeNameError)
			time.Sleep(100 * time.Millisecond)
		}
		if slow > 20 {
			t.Errorf("%d queries of 100 waited for the first server", slow)
		}
		time.Sleep(time.Minute)
		ask(dns.RcodeNameError)
		time.Sleep(2 * time.Millisecond)
		ask(dns.RcodeSuccess)
		time.Sleep(time.Minute) // the last replies
	})
}
