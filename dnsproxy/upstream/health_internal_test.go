//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// askDeadZone asks for names of the dead zone, so many a second, until stop is called, and checks how these queries end.
func askDeadZone(t *testing.T, g *Group, rate int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
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
	return func() { cancel(); asking.Wait() }
}

// deadQuery returns a query for a name of the dead zone.
func deadQuery(i int) []byte {
	query := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, 5)
	query = fmt.Appendf(query, "%05d", i%100_000)
	return wire.AppendQuestion(query, deadZone, dns.TypeA, dns.ClassINET)
}

// F3, F4, F16: while queries for names whose own servers are silent are in flight, other names
// neither fail nor wait, and the servers stay up and in their order.
func TestDeadZone(t *testing.T) {
	t.Parallel()
	for _, rate := range []int{10, 200} {
		synctest.Test(t, func(t *testing.T) {
			c := simulated(t, Config{})
			g, all := group(c, Options{}, steady(2*time.Millisecond), steady(20*time.Millisecond))
			stop := askDeadZone(t, g, rate)
			time.Sleep(5 * time.Second)
			for range 100 {
				began := time.Now()
				_, from, err := g.Exchange(t.Context(), simQuery, UDPOnly)
				if took := time.Since(began); err != nil || from != g.servers[0].name || took > 20*time.Millisecond {
					t.Errorf("beside %d queries a second: %v from %v after %v", rate, err, from, took)
				}
				time.Sleep(70 * time.Millisecond)
			}
			for _, status := range c.Status() {
				if status.State != Up {
					t.Errorf("beside %d queries a second: %v is %v", rate, status.Spec, status.State)
				}
			}
			stop()
			if most := rate * 12 * 6; all[0].asked() > most+1000 {
				t.Errorf("%d queries a second: %d were sent, want %d at most", rate, all[0].asked(), most)
			}
		})
	}
}

// F16: a server that lives and answers one of the probes' questions only, whichever it is, keeps its place while
// queries for a dead zone are in flight.
func TestDeadZoneAndOneProbe(t *testing.T) {
	t.Parallel()
	other := wire.NewQuery(wire.AppendQuestion(nil, "\x05other\x07example", dns.TypeNS, dns.ClassINET))
	for _, asks := range probeQuestions() {
		synctest.Test(t, func(t *testing.T) {
			c := simulated(t, Config{})
			g, all := group(c, Options{}, steady(2*time.Millisecond), steady(2*time.Millisecond))
			all[0].names = func(packet []byte) bool {
				return bytes.Contains(packet, asks) || bytes.Contains(packet, []byte("\x05other"))
			}
			stop := askDeadZone(t, g, 20)
			time.Sleep(3 * time.Second)
			for range 1000 {
				if st := g.servers[0].standing(time.Now()); st.state != Up {
					t.Errorf("it answers probe %q only: %+v", asks, st)
				}
				if _, _, err := g.Exchange(t.Context(), other, UDPOnly); err != nil {
					t.Error(err)
				}
				time.Sleep(7 * time.Millisecond)
			}
			stop()
		})
	}
}

// F4, F16: on a path that loses each 97th packet, a server that is first in the order keeps its place while
// queries for a dead zone are in flight: a lost probe does not give its names to the next server.
func TestLossKeepsOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		packets := 0
		loses := func(*rand.Rand, time.Duration) (time.Duration, int, bool) {
			packets++
			return 2 * time.Millisecond, dns.RcodeSuccess, packets%97 == 0
		}
		g, _ := group(c, Options{}, loses, says(steady(time.Millisecond), dns.RcodeNameError))
		stop := askDeadZone(t, g, 10)
		time.Sleep(5 * time.Second)
		for i := range 5000 {
			if reply, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); err != nil || rcode(reply) != dns.RcodeSuccess {
				t.Errorf("query %d has the answer of the second server, %v", i, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
		stop()
	})
}

// F3, F16: a server that lives and leaves all names unanswered, such as a forwarder that
// cannot reach its own servers, stays up and first in the order. Each name is asked of the next
// one, too, as soon as the first is late.
func TestServerWithoutAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		g, all := group(c, Options{}, rtt(time.Millisecond), steady(5*time.Millisecond))
		all[0].names = func(packet []byte) bool { return bytes.Contains(packet, probeQuestions()[1]) }
		for i := range 1000 {
			began := time.Now()
			answer, err := g.Ask(t.Context(), simQuery, UDPOnly)
			if took := time.Since(began); err != nil || !answer.Provisional || took > maxLate+50*time.Millisecond {
				t.Fatalf("query %d: %+v, %v after %v", i, answer, err, took)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if status := c.Status()[0]; status.State != Up {
			t.Errorf("it is %v", status.State)
		}
	})
}

// F10, F16: while all servers are dead most queries fail at once, and some are
// sent. Soon after a server is back, none fails.
func TestOverloadEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		const outage, found = 20 * time.Second, 1100 * time.Millisecond // by a probe
		dead := func(at time.Duration) bool { return at < outage }
		g, all := group(c, Options{}, deadWhile(rtt(time.Millisecond), dead), deadWhile(rtt(time.Millisecond), dead))
		var mu sync.Mutex
		refused := 0
		var asking sync.WaitGroup
		start, before := time.Now(), 0
		for i := range 6250 {
			asking.Go(func() {
				back := time.Since(start) > outage+found
				_, _, err := g.Exchange(t.Context(), simQuery, UDPOnly)
				mu.Lock()
				defer mu.Unlock()
				refused += count(errors.Is(err, ErrSilent))
				if back && err != nil {
					t.Errorf("query %d, with the servers back: %v", i, err)
				}
			})
			time.Sleep(4 * time.Millisecond)
			switch i {
			case 2500:
				before = all[0].asked()
			case 3750:
				if sent := all[0].asked() - before; sent < 30 || !g.Full() {
					t.Errorf("%d queries were sent in 5 s of overload, full: %v", sent, g.Full())
				}
			}
		}
		asking.Wait()
		if refused < 3750 || g.Full() {
			t.Errorf("%d queries of 5,000 were refused at once, full: %v", refused, g.Full())
		}
	})
}

// F10, F15, F6: when a server that is asked over TLS only falls silent with many queries in
// flight, further ones fail at once. A loop probe is sent nevertheless, and its result is used.
// When the server answers again, no query fails.
func TestOverloadEndsOverTLS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		const outage = 8 * time.Second
		g, all := group(c, Options{}, deadWhile(rtt(time.Millisecond), func(at time.Duration) bool { return at < outage }))
		g.servers[0].udp = nil
		ask := func() error {
			_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
			return err
		}
		var asking sync.WaitGroup
		for range 400 {
			asking.Go(func() {
				if err := ask(); !errors.Is(err, ErrLoop) {
					t.Errorf("in flight: %v", err)
				}
			})
		}
		time.Sleep(2 * time.Second) // they end with ErrLoop below
		if err := ask(); !errors.Is(err, ErrSilent) {
			t.Errorf("in overload: %v", err)
		}
		before := all[0].asked()
		g.Suspect()
		if sent := all[0].asked() - before; sent != 1 {
			t.Errorf("%d probes", sent)
		}
		echoAll(t, c)
		asking.Wait()
		time.Sleep(loopRecheck + outage)
		_ = ask() // starts another probe
		time.Sleep(time.Second)
		for range 10 {
			if err := ask(); err != nil {
				t.Errorf("with the server back: %v", err)
			}
		}
	})
}

// F16: when the only nameserver pauses for less than a second, at the start or later, no query
// is refused, although many wait for it.
func TestPauseRefusesNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		paused := func(at time.Duration) bool { return at%(5*time.Second) < 900*time.Millisecond }
		g, _ := group(c, Options{}, deadWhile(rtt(time.Millisecond), paused))
		var asking sync.WaitGroup
		for i := range 3000 {
			asking.Go(func() {
				if _, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); err != nil {
					t.Errorf("query %d: %v", i, err)
				}
			})
			time.Sleep(2 * time.Millisecond)
		}
		asking.Wait()
	})
}

// F4: a server that has a long queue after a pause gets no query twice, so the queue becomes short.
func TestQueueGetsShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pauseEnds, longest = 4 * time.Second, 500 * time.Millisecond
		free := time.Duration(0) // when the queue will be empty
		c := simulated(t, Config{})
		g, all := group(c, Options{}, func(_ *rand.Rand, at time.Duration) (time.Duration, int, bool) {
			if free = max(free, at); at > pauseEnds/2 {
				free = max(free, pauseEnds)
			}
			if free > max(at, pauseEnds)+longest {
				return 0, 0, true
			}
			free += time.Millisecond
			return free - at, dns.RcodeSuccess, false
		})
		const rate = 700
		var asking sync.WaitGroup
		before := 0
		for i := range 10 * rate {
			if i == 9*rate {
				before = all[0].asked()
			}
			asking.Go(func() { _, _, _ = g.Exchange(t.Context(), simQuery, UDPOnly) })
			time.Sleep(time.Second / rate)
		}
		if sent := all[0].asked() - before; sent > rate*11/10 {
			t.Errorf("%d queries a second were sent %d times", rate, sent)
		}
		asking.Wait()
	})
}

// F4: a first server that falls silent is down. Few queries wait for it, and it is logged once. Once it is back, a query
// after a minute probes it, and the next one gets its answer, although the second server says NXDOMAIN.
func TestOrderFirstIsBack(t *testing.T) {
	logged := new(testlog.Buffer)
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{Logger: logged.Logger()})
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
			slow += count(time.Since(began) > 20*time.Millisecond)
		}
		ask(dns.RcodeSuccess)
		time.Sleep(2 * time.Second)
		for range 100 {
			ask(dns.RcodeNameError)
			time.Sleep(100 * time.Millisecond)
		}
		if slow > 20 || c.Status()[0].State != Down {
			t.Errorf("%d queries of 100 waited for the first server, which is %v", slow, c.Status()[0].State)
		}
		time.Sleep(time.Minute)
		ask(dns.RcodeNameError)
		time.Sleep(2 * time.Millisecond)
		ask(dns.RcodeSuccess)
		if state := c.Status()[0].State; state != Up || logged.Count("is down") != 1 || logged.Count("answers again") != 1 {
			t.Errorf("it is %v, and the log:\n%s", state, logged)
		}
	})
}

// F4, R2: a nameserver that is dead is logged within 2 s of the first query that it does not answer, with the reason,
// although no query follows and another nameserver has answered.
func TestDeadIsLogged(t *testing.T) {
	for _, refuses := range []bool{false, true} {
		for servers := 1; servers <= 2; servers++ {
			for _, options := range []Options{{}, {UseVC: true}} {
				logged := new(testlog.Buffer)
				synctest.Test(t, func(t *testing.T) {
					c := simulated(t, Config{Logger: logged.Logger()})
					dead := deadWhile(steady(0), func(time.Duration) bool { return true })
					g, all := group(c, options, []behaviour{dead, steady(time.Millisecond)}[:servers]...)
					all[0].refuses = refuses
					_ = g.servers[0].reserveSocket() // as if it had one
					var asking sync.WaitGroup
					asking.Go(func() { _, _, _ = g.Exchange(t.Context(), simQuery, UDPThenTCP) })
					time.Sleep(2 * time.Second)
					reason := "no reply in time"
					if refuses {
						reason = "connection refused"
					}
					if logged.Count("nameserver is down", reason) != 1 {
						t.Errorf("%d servers, %+v, refuses %v: the log has\n%s", servers, options, refuses, logged)
					}
					asking.Wait()
				})
			}
		}
	}
}

// F4, F5: a query ends in time, and the error has the cause for each server.
func TestTimeout(t *testing.T) {
	for name, tc := range map[string]struct {
		config  Config
		options Options
		want    time.Duration
	}{
		"the default":             {want: 4 * time.Second},
		"the client's":            {config: Config{Timeout: time.Second}, want: time.Second},
		"resolv.conf's":           {options: Options{Timeout: 500 * time.Millisecond, Attempts: 1}, want: time.Second},
		"resolv.conf's, attempts": {options: Options{Timeout: 500 * time.Millisecond}, want: 2 * time.Second},
		"resolv.conf's, timeout":  {config: Config{Timeout: time.Minute}, options: Options{Attempts: 2}, want: 20 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := simulated(t, tc.config)
			dead := deadWhile(steady(0), func(time.Duration) bool { return true })
			g, all := group(c, tc.options, dead, dead)
			all[1].refuses = true
			began := time.Now()
			_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
			took := time.Since(began)
			if !errors.Is(err, ErrTimeout) || !errors.Is(err, syscall.ECONNREFUSED) || took < tc.want || took > tc.want {
				t.Errorf("%s: %v after %v, want %v", name, err, took, tc.want)
			}
			if want := "no nameserver answered: 192.0.2.0: no reply in time; 192.0.2.1: connection refused"; err.Error() != want {
				t.Errorf("%q, want %q", err, want)
			}
		})
	}
}

// A11: a message with an opcode other than QUERY is sent once, however late the reply is.
func TestOtherOpcodesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		g, all := group(c, Options{}, steady(600*time.Millisecond), steady(600*time.Millisecond))
		updates := 0
		count := func(packet []byte) bool { updates += count(!isQuery(packet)); return true }
		all[0].names, all[1].names = count, count
		update := bytes.Clone(simQuery)
		update[2] |= 5 << 3
		if _, from, err := g.Exchange(t.Context(), update, UDPOnly); err != nil || from != g.servers[0].name || updates != 1 {
			t.Errorf("sent %d times, answered by %v: %v", updates, from, err)
		}
	})
}
