package dnsproxy_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// ends waits for the end of Run, which must come while a nameserver is silent, long before
// its queries time out.
func (p *proxy) ends(t *testing.T) {
	t.Helper()
	select {
	case err := <-p.ended:
		if err != nil {
			t.Errorf("Run returned %v", err)
		}
	case <-time.After(wait.Limit / 2):
		t.Error("Run does not return")
	}
}

// While the bound of queries in flight is reached, mesh names and cached names, stale ones
// included, are answered, and a new query takes the place of the oldest one, which is refused. Queries in
// flight are answered, also after the shutdown has begun.
func TestFullOfQueries(t *testing.T) { // F10, F9, F8, F12, F13, R1
	t.Parallel()
	const most = 8
	meetings(t, dnsproxy.Config{Forward: forward.Config{MaxInflight: most, Timeout: wait.Limit}}, func(m *meeting) {
		t := m.t
		m.fake.Handle(m.world(t, worldAddr, 2))
		m.agree(t, 0)
		m.await(t, "nametap_dns_inflight", 0)
		release := m.hold(t, m.world(t, worldAddr, 300))
		m.fake.Reset()
		inFlight := m.fill(t, "fill", most)
		for name, k := range kinds(0) {
			wait.Until(t, name+": it has expired", func() bool {
				resp := m.ask(t, k.name, dns.TypeA)
				if got, want := outcome(resp), k.outcome(worldAddr); got != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
				return k.asks == "" || len(resp.Answer) > 0 && resp.Answer[0].Header().Ttl == 30
			})
		}
		later := m.fill(t, "later", most)
		for i, answer := range inFlight {
			if got := wait.For(t, "an answer", answer); got != "SERVFAIL" {
				t.Errorf("%d, the place of which was taken: %s", i, got)
			}
		}
		if n := m.count(t, "nametap_dns_inflight"); n != most {
			t.Errorf("%v queries in flight", n)
		}
		m.cancel()
		wait.Until(t, "the listeners are closed", func() bool { return m.closed() })
		release()
		for i, answer := range later {
			if got, want := wait.For(t, "an answer", answer), name("later", i)+". A "+worldAddr; got != want {
				t.Errorf("in flight: %s, want %s", got, want)
			}
		}
		m.ends(t)
	})
}

// fill sends n queries that the nameserver holds, one after the other, and returns their outcomes to come.
func (m *meeting) fill(t *testing.T, label string, n int) []<-chan string {
	t.Helper()
	var inFlight []<-chan string
	for i := range n {
		answer := make(chan string, 1)
		before := m.held.Load()
		go func() { answer <- outcome(m.ask(t, name(label, i), dns.TypeA)) }()
		wait.Until(t, "the query is in flight", func() bool { return m.held.Load() > before })
		inFlight = append(inFlight, answer)
	}
	return inFlight
}

// name returns the name of a query of fill.
func name(label string, i int) string { return fmt.Sprintf("%s.zone%d.example", label, i) }

// closed reports whether the server has stopped accepting connections.
func (p *proxy) closed() bool {
	conn, err := (&dns.Client{Net: "tcp"}).Dial(p.addr("tcp"))
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err != nil
}

// The nameserver becomes silent during a refresh: after the answer has expired clients join
// the refresh, so the server is probed for a loop, and they get the stale answer. The
// shutdown does not wait for the refresh.
func TestEndWithWorkInBackground(t *testing.T) { // F8, F9, F6, R1
	t.Parallel()
	meetings(t, dnsproxy.Config{Forward: forward.Config{Timeout: 10 * wait.Limit}}, func(m *meeting) {
		t := m.t
		m.fake.Handle(m.world(t, worldAddr, 2))
		m.ask(t, "www0.example", dns.TypeA)
		m.hold(t, m.world(t, otherAddr, 300))
		ask := func() *dns.Msg {
			resp := m.ask(t, "www0.example", dns.TypeA)
			if got := outcome(resp); got != "www0.example. A "+worldAddr {
				t.Fatalf("got %s", got)
			}
			return resp
		}
		wait.Until(t, "a refresh", func() bool { return ask() != nil && m.held.Load() > 0 })
		wait.Until(t, "a stale answer", func() bool { return ask().Answer[0].Header().Ttl == 30 })
		wait.Until(t, "the nameserver is probed", func() bool { return m.probes.Load() > 0 })
		m.cancel()
		m.ends(t)
	})
}

// Overloaded nameservers are ignored once resolv.conf lists others.
func TestOverloadEndsWithChange(t *testing.T) { // F10, F16, F17
	t.Parallel()
	const network = "127.0.56"
	h := newHandover(t, network, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}})
	h.hold(message(t, dns.RcodeSuccess, "www.example. 900 IN A 192.0.2.1"))
	defer h.release()
	conn := h.dial(t, "udp")
	defer conn.Close()
	sent := 0
	wait.Until(t, "queries are refused", func() bool {
		packet, err := question(fmt.Sprintf("www.zone%d.example%d", sent, sent), dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		write(t, conn, packet)
		sent++
		return h.count(t, "nametap_dns_overflows_total") > 0
	})
	h.change(t, network)
	for i := range 10 {
		h.converse(t, []dialogue{{fmt.Sprintf("www%d.example A", i), fmt.Sprintf("www%d.example. A 192.0.2.2", i)}})
	}
}

// A nameserver in a loop is ignored once resolv.conf lists another.
func TestLoopEndsWithChange(t *testing.T) { // F6, F17
	t.Parallel()
	const network = "127.0.57"
	h := newHandover(t, network, dnsproxy.Config{})
	h.before.Handle(forwardTo(func() string { return h.addr("udp") }))
	h.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
	wait.Until(t, "the loop is found", func() bool { return h.UpstreamStatus()[0].State == upstream.Looping })
	h.change(t, network)
	h.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.2"}})
}

// The shutdown begins while one query is in flight at the previous nameserver and another
// at the current one, after a change of resolv.conf.
func TestChangeWhileEnding(t *testing.T) { // F17, R1
	t.Parallel()
	const network = "127.0.58"
	h := newHandover(t, network, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}})
	var late atomic.Int64
	released := make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	t.Cleanup(release)
	after := on53(t, network+".3", func(query *dns.Msg, network string) *dns.Msg {
		late.Add(1)
		<-released
		return anywhere("192.0.2.3")(query, network)
	})
	h.hold(message(t, dns.RcodeSuccess, "www.example. 900 IN A 192.0.2.1"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conf := resolvConf(t, "nameserver "+network+".1")
	h.proxy = startIn(ctx, t, dnsproxy.Config{Forward: forward.Config{ResolvConf: conf, Timeout: wait.Limit}})
	h.load(t, hosts{})
	var asking sync.WaitGroup
	ask := func(want string) {
		asking.Go(func() {
			if got := outcome(h.ask(t, "www.example", dns.TypeA)); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
	ask("www.example. A 192.0.2.1")
	wait.Until(t, "the query before", func() bool { return h.held.Load() > 0 })
	writeFile(t, conf, "nameserver "+network+".3\n")
	wait.Until(t, "the change", func() bool { return h.Upstreams()[0].Addr == after.Addr })
	ask("www.example. A 192.0.2.3")
	wait.Until(t, "the query after", func() bool { return late.Load() > 0 })
	cancel()
	wait.Until(t, "the listeners are closed", func() bool { return h.closed() })
	h.release()
	release()
	asking.Wait()
	h.ends(t)
}

// Answers of the previous nameservers are not used as stale ones after a change of
// resolv.conf, even if the current nameservers are silent.
func TestStaleEndsWithChange(t *testing.T) { // F9, F17
	t.Parallel()
	const network = "127.0.59"
	h := newHandover(t, network, dnsproxy.Config{Forward: forward.Config{Timeout: 2 * time.Second}})
	after := on53(t, network+".3", fakedns.Silence)
	h.before.Handle(fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
	h.ask(t, "www.example", dns.TypeA)
	h.before.Handle(fakedns.Silence)
	wait.Until(t, "a stale answer", func() bool { return h.ask(t, "www.example", dns.TypeA).Answer[0].Header().Ttl == 30 })
	writeFile(t, h.path, "nameserver "+network+".3\n")
	wait.Until(t, "the change", func() bool { return h.Upstreams()[0].Addr == after.Addr })
	h.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
	after.Handle(anywhere("192.0.2.3"))
	wait.Until(t, "the answer of the new one", func() bool {
		return outcome(h.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.3"
	})
}
