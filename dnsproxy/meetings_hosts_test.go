package dnsproxy_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// change makes all the hosts of p. It loads the shards of the named hosts, which have changed.
func (p *proxy) change(tb testing.TB, all hosts, named ...string) {
	tb.Helper()
	shards, changed := byShard(tb, all), map[int][]byte{}
	for _, host := range named {
		at := digest.ShardOf(host)
		changed[at] = shards[at]
	}
	if err := p.Load(changed); err != nil {
		tb.Fatal(err)
	}
}

// flying queries a name that the nameserver holds, and waits until it has the query. The outcome follows.
func (m *meeting) flying(name string) (got <-chan string) {
	answered, held := make(chan string, 1), m.held.Load()
	go func() { answered <- outcome(m.exchange(m.t, "udp", question(name, dns.TypeA))) }()
	wait.Until(m.t, name+" is in flight", func() bool { return m.held.Load() > held })
	return answered
}

// Single hosts are added and removed whose names, of each kind, are in the cache, in flight, or expanded with
// the search list: each query that arrives after a change is answered from the table of then. Queries in
// flight get the reply of the nameserver, also during a shutdown.
func TestHostsChange(t *testing.T) { // C11, F6, F8, F12, F13, R1
	t.Parallel()
	meetings(t, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}}, func(m *meeting) {
		t := m.t
		before := hosts{
			"web.shop.svc.cluster.local": service("web", "shop", webAddr), "db.secret.example": external(dbAddr),
			"a0.open.example": external("10.0.0.3"),
		}
		after := hosts{
			"new.shop.svc.cluster.local": service("new", "shop", "10.0.0.9"), "www0.example": external("10.0.0.9"),
			"www1.example": external("10.0.0.9"), "none0.secret.example": external("10.0.0.9"),
			"a1.open.example": external("10.0.0.9"), "*.wild.example": external("10.0.0.9"),
		}
		var changed []string
		for host := range after {
			changed = append(changed, host)
		}
		for host, info := range before {
			after[host] = info
		}
		m.agree(t, 0) // fills the cache
		release := m.hold(t, m.world(t, worldAddr, 300))
		flying := m.flying("www1.example")
		m.change(t, after, changed...)
		m.converse(t, []dialogue{
			{"www0.example A", "www0.example. A 10.0.0.9"},
			{"WWW1.example A", "WWW1.example. A 10.0.0.9"},
			{"x.wild.example A", "x.wild.example. A 10.0.0.9"},
			{"none0.secret.example A", "none0.secret.example. A 10.0.0.9"},
			{"new.corp.example A", "new.corp.example. CNAME new.shop.svc.cluster.local.; new.shop.svc.cluster.local. A 10.0.0.9"},
		})
		release()
		if got, want := <-flying, "www1.example. A "+worldAddr; got != want {
			t.Errorf("in flight: %s, want %s", got, want)
		}
		m.converse(t, []dialogue{
			{"a1.open.example A", "a1.open.example. A " + worldAddr},
		})
		m.change(t, before, changed...)
		m.agree(t, 0)
		m.converse(t, []dialogue{
			{"x.wild.example A", "x.wild.example. A " + worldAddr},
			{"new.corp.example A", "new.corp.example. A " + worldAddr},
		})
		if n := m.asked("www0.example."); n != 1 {
			t.Errorf("www0.example was asked for %d times, and it was in the cache", n)
		}

		release = m.hold(t, m.world(t, worldAddr, 300))
		flying = m.flying("www2.example")
		m.cancel()
		wait.Until(t, "the listeners are closed", func() bool { return m.closed() })
		m.change(t, after, changed...)
		release()
		if got, want := <-flying, "www2.example. A "+worldAddr; got != want {
			t.Errorf("in flight at the end: %s, want %s", got, want)
		}
		if err := <-m.ended; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
}
