package dnsproxy_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A meeting is a proxy with all rules for names at once, and its one nameserver, reached
// over UDP, TCP or TLS.
type meeting struct {
	*proxy
	t      *testing.T
	cancel func() // begins the shutdown
	fake   *fakedns.Server
	conf   string       // the path of resolv.conf
	held   atomic.Int64 // queries that the nameserver is holding
	probes atomic.Int64 // loop probes that it has answered
}

// The addresses that the nameserver answers with, and the addresses in the table.
const (
	worldAddr = "192.0.2.1"
	otherAddr = "192.0.2.2"
	webAddr   = "10.0.0.1"
	dbAddr    = "10.0.0.2"
)

// A kind is a name for one of the rules.
type kind struct {
	name string
	want string // its outcome, <addr> for the address of the nameserver
	asks string // the name that the nameserver is queried for; empty if it is not
}

// kinds returns a new name for each rule; n numbers the calls.
func kinds(n int) map[string]kind {
	return map[string]kind{
		"plain":             {fmt.Sprintf("www%d.example", n), "<name> A <addr>", fmt.Sprintf("www%d.example.", n)},
		"bypass":            {fmt.Sprintf("a%d.open.example", n), "<name> A <addr>", fmt.Sprintf("a%d.open.example.", n)},
		"autopath":          {"web.corp.example", "<name> CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A " + webAddr, ""},
		"local-only":        {"db.secret.example", "<name> A " + dbAddr, ""},
		"local-only, none":  {fmt.Sprintf("none%d.secret.example", n), "NXDOMAIN", ""},
		"local-only, below": {fmt.Sprintf("none%d.secret.example.shop.svc.cluster.local", n), "NXDOMAIN", ""},
	}
}

// outcome returns the outcome for clients while the nameserver answers with addr.
func (k kind) outcome(addr string) string {
	return strings.NewReplacer("<name>", k.name+".", "<addr>", addr).Replace(k.want)
}

// world is the nameserver's handler: it answers the names of kinds, and loop probes.
func (m *meeting) world(tb testing.TB, addr string, ttl int) fakedns.Handler {
	tb.Helper()
	soa, err := dns.NewRR("example. 300 IN SOA ns.example. h.example. 1 2 3 4 300")
	if err != nil {
		tb.Fatal(err)
	}
	return func(query *dns.Msg, network string) *dns.Msg {
		name := query.Question[0].Name
		if strings.HasSuffix(name, upstream.LoopZone) {
			m.probes.Add(1)
		}
		exists := strings.HasSuffix(name, ".example.") && strings.Count(name, "example.") == 1
		if exists && query.Question[0].Qtype == dns.TypeA {
			return fakedns.Answer(fmt.Sprintf("%s %d IN A %s", name, ttl, addr))(query, network)
		}
		reply := new(dns.Msg).SetRcode(query, dns.RcodeNameError)
		reply.Ns = []dns.RR{soa}
		return reply
	}
}

// hold makes the nameserver hold its queries, except probes, until the returned function is
// called.
func (m *meeting) hold(tb testing.TB, answer fakedns.Handler) (release func()) {
	tb.Helper()
	released := make(chan struct{})
	release = sync.OnceFunc(func() { close(released) })
	tb.Cleanup(release)
	m.fake.Handle(func(query *dns.Msg, network string) *dns.Msg {
		if !strings.HasSuffix(query.Question[0].Name, upstream.LoopZone) && len(query.Question[0].Name) > len("localhost.") {
			m.held.Add(1)
			<-released
		}
		return answer(query, network)
	})
	return release
}

// asked returns the number of the nameserver's queries for the A records of a name.
func (m *meeting) asked(name string) (n int) {
	for _, q := range m.fake.Queries() {
		if strings.EqualFold(q.Name, name) && q.Type == dns.TypeA {
			n++
		}
	}
	return n
}

// meetings runs a subtest for each transport to nameservers.
func meetings(t *testing.T, cfg dnsproxy.Config, test func(m *meeting)) {
	t.Helper()
	for _, over := range []string{"UDP", "TCP", "TLS"} {
		t.Run(over, func(t *testing.T) {
			t.Parallel()
			test(newMeeting(t, over, cfg))
		})
	}
}

// newMeeting starts one.
func newMeeting(t *testing.T, over string, cfg dnsproxy.Config) *meeting {
	t.Helper()
	m := &meeting{t: t}
	lines := []string{"nameserver 192.0.2.53", "search shop.svc.cluster.local svc.cluster.local corp.example", "options ndots:5"}
	if over == "TCP" {
		lines = append(lines, "options use-vc")
	}
	m.conf = resolvConf(t, lines...)
	spec := upstream.Spec{}
	if over == "TLS" {
		fake, authority := fakedns.StartTLS(t, fakedns.Silence, "dns.example")
		m.fake, cfg.Forward.RootCA = fake, filepath.Join(t.TempDir(), "ca.pem")
		writeFile(t, cfg.Forward.RootCA, string(authority))
		spec.TLS, spec.ServerName = true, "dns.example"
	} else {
		m.fake = nameserver(t, fakedns.Silence)
	}
	m.fake.Handle(m.world(t, worldAddr, 300))
	spec.Addr = m.fake.Addr
	cfg.Forward.ResolvConf, cfg.Forward.Upstreams = m.conf, []upstream.Spec{spec}
	cfg.Bypass, cfg.LocalOnly = []string{"open.example"}, []string{"secret.example", "svc.cluster.local"}
	ctx, cancel := context.WithCancel(t.Context())
	m.cancel = cancel
	t.Cleanup(cancel)
	m.proxy = startIn(ctx, t, cfg)
	m.load(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", webAddr),
		"db.secret.example":          external(dbAddr),
		"a0.open.example":            external("10.0.0.3"),
	})
	return m
}

// writeFile writes a file in place.
func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// agree queries all kinds of names and compares the outcomes.
func (m *meeting) agree(t *testing.T, n int) {
	t.Helper()
	for name, k := range kinds(n) {
		if got, want := outcome(m.ask(t, k.name, dns.TypeA)), k.outcome(worldAddr); got != want {
			t.Errorf("%s: %s: %s, want %s", name, k.name, got, want)
		}
	}
}

// Many clients query names of each kind while the nameserver is late: mesh names are
// answered at once, each other question is sent once, the loop probe finds no loop, and the
// shutdown, which begins meanwhile, loses no query.
func TestNamesInFlight(t *testing.T) { // F8, F6, F12, F13, F15, R1
	t.Parallel()
	meetings(t, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}}, func(m *meeting) {
		t := m.t
		const clients = 30
		m.agree(t, 1) // fills the cache
		m.fake.Reset()
		release := m.hold(t, m.world(t, worldAddr, 300))
		var own, forwarded sync.WaitGroup
		for name, k := range kinds(0) {
			group := &own
			if k.asks != "" {
				group = &forwarded
			}
			for i := range clients {
				group.Go(func() {
					got := outcome(m.exchange(t, []string{"udp", "tcp"}[i%2], question(k.name, dns.TypeA)))
					if want := k.outcome(worldAddr); got != want {
						t.Errorf("%s: %s, want %s", name, got, want)
					}
				})
			}
		}
		own.Wait()
		wait.Until(t, "all are in flight", func() bool { return m.count(t, "nametap_dns_inflight") >= 2*clients })
		wait.Until(t, "the nameserver is probed", func() bool { return m.probes.Load() > 0 })
		m.agree(t, 1) // from the cache
		if state := m.UpstreamStatus()[0].State; state == upstream.Looping {
			t.Errorf("the nameserver is %v", state)
		}
		m.cancel()
		wait.Until(t, "the listeners are closed", func() bool { return m.closed() })
		for _, k := range kinds(0) {
			if n := m.asked(k.asks); k.asks != "" && n >= clients {
				t.Errorf("%s was asked for %d times, for %d clients", k.asks, n, clients)
			}
		}
		release()
		forwarded.Wait()
		if err := <-m.ended; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
}

// Popular names of each kind are refreshed if they are forwarded, and never sent to a
// nameserver otherwise; a name that a push adds to the table is no longer answered from the
// cache.
func TestNamesRefreshed(t *testing.T) { // F8, F12, F13, F15
	t.Parallel()
	meetings(t, dnsproxy.Config{}, func(m *meeting) {
		t := m.t
		m.fake.Handle(m.world(t, worldAddr, 2))
		for name, k := range kinds(0) {
			before := m.bySource(t, "upstream")
			refreshed := func() bool {
				if got, want := outcome(m.ask(t, k.name, dns.TypeA)), k.outcome(worldAddr); got != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
				return k.asks == "" || float64(m.asked(k.asks)) > m.bySource(t, "upstream")-before
			}
			wait.Until(t, name+": a question of our own accord", refreshed)
		}
		for _, q := range m.fake.Queries() {
			if strings.HasPrefix(q.Name, "web.") || strings.HasPrefix(q.Name, "db.") || strings.Contains(q.Name, "secret") {
				t.Errorf("asked for %s", q.Name)
			}
		}
		m.load(t, hosts{"www0.example": external(dbAddr), "a0.open.example": external(dbAddr)})
		m.converse(t, []dialogue{
			{"www0.example A", "www0.example. A " + dbAddr},
			{"a0.open.example A", "a0.open.example. A " + worldAddr},
			{"web.corp.example A", "web.corp.example. A " + worldAddr},
			{"db.secret.example A", "NXDOMAIN"},
		})
	})
}

// While the nameserver is silent, forwarded names get stale answers and all others are
// answered as before. Clients that wait for the same question cause a loop probe. A changed
// search list takes effect at once.
func TestNamesStale(t *testing.T) { // F9, F12, F13, F15, F5
	t.Parallel()
	meetings(t, dnsproxy.Config{}, func(m *meeting) {
		t := m.t
		m.fake.Handle(m.world(t, worldAddr, 1))
		m.agree(t, 0)
		m.fake.Handle(func(query *dns.Msg, _ string) *dns.Msg {
			if strings.HasSuffix(query.Question[0].Name, upstream.LoopZone) {
				m.probes.Add(1)
			}
			return nil
		})
		for name, k := range kinds(0) {
			if k.asks == "" {
				continue
			}
			var asking sync.WaitGroup
			for range 2 {
				asking.Go(func() {
					wait.Until(t, name+": a stale answer", func() bool {
						resp := m.ask(t, k.name, dns.TypeA)
						if got, want := outcome(resp), k.outcome(worldAddr); got != want {
							t.Errorf("%s: %s, want %s", name, got, want)
						}
						return len(resp.Answer) > 0 && resp.Answer[len(resp.Answer)-1].Header().Ttl == 30
					})
				})
			}
			asking.Wait()
		}
		wait.Until(t, "the nameserver is probed", func() bool {
			m.ask(t, "www0.example", dns.TypeA)
			return m.probes.Load() > 0
		})
		m.agree(t, 0)
		text, err := os.ReadFile(m.conf)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, m.conf, strings.Replace(string(text), "corp.example", "lab.example", 1))
		m.fake.Handle(m.world(t, otherAddr, 300))
		lab := []dialogue{
			{"web.lab.example A", "web.lab.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A " + webAddr},
			{"none.secret.example.lab.example A", "NXDOMAIN"},
			{"none.secret.example.corp.example A", "NXDOMAIN"},
		}
		wait.Until(t, "the new search list", func() bool { return outcome(m.ask(t, "web.lab.example", dns.TypeA)) == lab[0].want })
		m.converse(t, lab)
		if m.asked("none.secret.example.lab.example.") > 0 || m.asked("none.secret.example.corp.example.") == 0 {
			t.Error("the local names do not follow the current search list")
		}
		for name, k := range kinds(0) {
			if name == "autopath" {
				continue // its domain is not in the search list any more
			}
			wait.Until(t, name+": what the nameserver says now", func() bool {
				return outcome(m.ask(t, k.name, dns.TypeA)) == k.outcome(otherAddr)
			})
		}
	})
}
