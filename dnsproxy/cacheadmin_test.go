package dnsproxy_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// The cache lists its entries, and removes flushed ones.
func TestFlushCache(t *testing.T) { // F21
	t.Parallel()
	fake := nameserver(t, anywhere("192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	names := []string{"a.example", "b.a.example", "xa.example"}
	for _, c := range []struct {
		selection forward.CacheSelection
		asked     int
	}{
		{forward.CacheSelection{Name: "A.example."}, 1},
		{forward.CacheSelection{Suffix: "a.example"}, 2},
		{forward.CacheSelection{Name: "none.example"}, 0},
		{forward.CacheSelection{}, 3},
	} {
		for _, name := range names {
			p.ask(t, name, dns.TypeA)
		}
		content, err := p.CacheContent(c.selection, 100)
		if err != nil || content.Total != c.asked || len(content.Entries) != c.asked {
			t.Errorf("%+v shows %+v, %v", c.selection, content, err)
		}
		fake.Reset()
		if n, err := p.FlushCache(c.selection); n != c.asked || err != nil {
			t.Errorf("%+v flushed %d, %v", c.selection, n, err)
		}
		for _, name := range names {
			p.ask(t, name, dns.TypeA)
		}
		asked := map[string]bool{} // on a busy machine the nameserver is late, and a query is sent again
		for _, q := range fake.Queries() {
			asked[q.Name] = true
		}
		if len(asked) != c.asked {
			t.Errorf("after %+v asked %v", c.selection, asked)
		}
	}
	if _, err := p.FlushCache(forward.CacheSelection{Name: "a", Suffix: "b"}); err == nil {
		t.Error("a name and a suffix are taken")
	}
}

// A reply in flight when the cache is flushed is not cached.
func TestQueryInFlightAtFlush(t *testing.T) { // F21, F17
	t.Parallel()
	h := newHandover(t, "127.0.56", dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}})
	h.hold(message(t, dns.RcodeSuccess, "www.example. 900 IN A 192.0.2.1"))
	first := make(chan string)
	go func() { first <- outcome(h.ask(t, "www.example", dns.TypeA)) }()
	wait.Until(t, "the query", func() bool { return h.held.Load() > 0 })
	if _, err := h.FlushCache(forward.CacheSelection{Name: "www.example"}); err != nil {
		t.Fatal(err)
	}
	h.before.Handle(anywhere("192.0.2.9"))
	now := []dialogue{{"www.example A", "www.example. A 192.0.2.9"}}
	h.converse(t, now)
	h.release()
	if got := <-first; got != "www.example. A 192.0.2.1" && got != now[0].want {
		t.Errorf("the client that asked before has %s", got)
	}
	h.await(t, "nametap_dns_inflight", 0)
	h.converse(t, now)
}
