package dnsproxy_test

import (
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// The cache lists its entries, and removes flushed ones.
func TestFlushCache(t *testing.T) { // F21
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, anywhere("192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		for _, c := range []struct {
			selection forward.CacheSelection
			asked     int
		}{
			{forward.CacheSelection{Name: "A.example."}, 1},
			{forward.CacheSelection{Suffix: "a.example"}, 2},
			{forward.CacheSelection{Name: "none.example"}, 0},
			{forward.CacheSelection{}, 3},
		} {
			ask := func() {
				for _, name := range []string{"a.example", "b.a.example", "xa.example"} {
					p.ask(t, name, dns.TypeA)
				}
			}
			ask()
			content, err := p.CacheContent(c.selection, 100)
			if err != nil || content.Total != c.asked || len(content.Entries) != c.asked {
				t.Errorf("%+v shows %+v, %v", c.selection, content, err)
			}
			fake.Reset()
			if n, err := p.FlushCache(c.selection); n != c.asked || err != nil {
				t.Errorf("%+v flushed %d, %v", c.selection, n, err)
			}
			ask()
			wantAsked(t, c.asked, fake)
		}
		if _, err := p.FlushCache(forward.CacheSelection{Name: "a", Suffix: "b"}); err == nil {
			t.Error("a name and a suffix are taken")
		}
	})
}
