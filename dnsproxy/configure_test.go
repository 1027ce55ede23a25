package dnsproxy_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// configure changes the settings of a proxy whose resolv.conf is at path.
func (p *proxy) configure(tb testing.TB, path string, cfg dnsproxy.Config) {
	tb.Helper()
	cfg.Forward.ResolvConf, cfg.Forward.Timeout = path, time.Hour
	if err := p.Configure(cfg); err != nil {
		tb.Fatal(err)
	}
}

// Every setting of answers is in use once Configure has returned; zero values are the defaults again. Later
// pushes follow from the table in use.
func TestConfigureAnswers(t *testing.T) { // R10, F12, F13
	synctest.Test(t, func(t *testing.T) {
		world, corp := nameserver(t, anywhere("192.0.2.1")), nameserver(t, anywhere("192.0.2.2"))
		path := resolvConf(t, "search shop.svc.cluster.local corp.example")
		upstreams := forward.Config{ResolvConf: path, Upstreams: servers(world)}
		p := start(t, dnsproxy.Config{Forward: upstreams})
		mesh := hosts{
			"web.shop.svc.cluster.local": service("web", "shop", addrs(0, 50)...),
			"a.b.corp.example":           external("10.1.0.1"),
		}
		p.load(t, mesh)
		web := func(edns uint16) (answers int, ttl uint32, truncated bool) {
			t.Helper()
			req := question("web.shop.svc.cluster.local", dns.TypeA)
			if edns > 0 {
				req = withEDNS(req, edns)
			}
			resp := p.exchange(t, "udp", req)
			return len(resp.Answer), resp.Answer[0].Header().Ttl, resp.Truncated
		}
		wantWeb := func(edns uint16, answers int, ttl uint32, truncated bool) {
			t.Helper()
			if n, gotTTL, cut := web(edns); n != answers || gotTTL != ttl || cut != truncated {
				t.Errorf("%d answers with TTL %d, truncated: %v; want %d with %d, %v", n, gotTTL, cut, answers, ttl, truncated)
			}
		}
		wantWeb(4096, 50, 30, false)
		p.configure(t, path, dnsproxy.Config{Forward: upstreams, TTL: 7 * time.Second})
		wantWeb(4096, 50, 7, false)
		if soa := p.ask(t, "web.shop", dns.TypeAAAA).Ns[0]; soa.Header().Ttl != 7 || soa.(*dns.SOA).Minttl != 7 {
			t.Errorf("the SOA record is %v", soa)
		}
		p.configure(t, path, dnsproxy.Config{Forward: upstreams, EDNSUDPSize: 512})
		if _, ttl, truncated := web(4096); ttl != 30 || !truncated {
			t.Errorf("the TTL is %d, truncated: %v", ttl, truncated)
		}
		const expanded, bypassed, unknown, ancestor = "a.b.corp.example.shop.svc.cluster.local", "a.b.corp.example", "c.b.corp.example", "b.corp.example"
		p.configure(t, path, dnsproxy.Config{Forward: upstreams})
		p.converse(t, []dialogue{
			{expanded + " A", expanded + ". CNAME a.b.corp.example.; a.b.corp.example. A 10.1.0.1"},
			{bypassed + " A", bypassed + ". A 10.1.0.1"}, {unknown + " A", unknown + ". A 192.0.2.1"},
		})
		p.configure(t, path, dnsproxy.Config{Forward: upstreams, Bypass: []string{"a.b.corp.example"}})
		p.converse(t, []dialogue{{bypassed + " A", bypassed + ". A 192.0.2.1"}})
		p.configure(t, path, dnsproxy.Config{Forward: upstreams, LocalOnly: []string{"corp.example"}})
		p.converse(t, []dialogue{
			{bypassed + " A", bypassed + ". A 10.1.0.1"}, {unknown + " A", "NXDOMAIN"}, {ancestor + " A", "NODATA corp.example."},
		})
		if got := fmt.Sprint(p.LocalOnly()); got != "[corp.example.]" {
			t.Errorf("LocalOnly is %s", got)
		}
		delete(mesh, bypassed)
		mesh["z.y.corp.example"] = external("10.1.0.2")
		p.load(t, mesh)
		p.converse(t, []dialogue{{ancestor + " A", "NXDOMAIN"}, {"y.corp.example A", "NODATA corp.example."}})
		p.configure(t, path, dnsproxy.Config{Forward: upstreams})
		p.converse(t, []dialogue{{unknown + " A", unknown + ". A 192.0.2.1"}, {"x.onion A", "NXDOMAIN"}})
		upstreams.Routes = []forward.Route{{Suffix: "onion", Servers: servers(corp)}}
		p.configure(t, path, dnsproxy.Config{Forward: upstreams})
		p.converse(t, []dialogue{{"x.onion A", "x.onion. A 192.0.2.2"}})
	})
}

// With a wrong setting nothing changes, whichever it is.
func TestConfigureRefuses(t *testing.T) { // R10
	synctest.Test(t, func(t *testing.T) {
		world := nameserver(t, anywhere("192.0.2.1"))
		path := resolvConf(t)
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path, Upstreams: servers(world)}})
		other := forward.Config{ResolvConf: path, Upstreams: servers(nameserver(t, anywhere("192.0.2.2")))}
		route := other
		route.Routes = []forward.Route{{Suffix: "a..b", Servers: servers(world)}}
		order := other
		order.Order = "none"
		for want, cfg := range map[string]dnsproxy.Config{
			`TTL 1ns`: {Forward: other, TTL: 1}, `bypass ".."`: {Forward: other, TTL: time.Minute, Bypass: []string{".."}},
			`local-only "a..b"`:     {Forward: other, TTL: time.Minute, LocalOnly: []string{"a..b"}},
			`upstream for "a..b"`:   {Forward: route, TTL: time.Minute, Bypass: []string{"shop.svc.cluster.local"}},
			`upstream-order "none"`: {Forward: order, TTL: time.Minute},
		} {
			if err := p.Configure(cfg); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("the error is %v, want one with %s", err, want)
			}
		}
		if resp := p.ask(t, "web.shop.svc.cluster.local", dns.TypeA); len(resp.Answer) != 1 || resp.Answer[0].Header().Ttl != 30 {
			t.Errorf("the answer is\n%v", resp)
		}
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	})
}

// A change of nameservers flushes the cache; other changes do not.
func TestConfigureKeepsReplies(t *testing.T) { // R10, F8, F17
	synctest.Test(t, func(t *testing.T) {
		var step atomic.Int64
		from := func(server int) *fakedns.Server { // whose answers say in which step it was asked
			return nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
				return anywhere(fmt.Sprintf("192.0.%d.%d", step.Load(), server))(query, network)
			})
		}
		one, two, three := servers(from(1)), servers(from(2)), servers(from(3))
		path := resolvConf(t)
		suffix := func(name string) []forward.Route { return []forward.Route{{Suffix: name, Servers: two}} }
		names := []string{"www.a.example", "www.b.example", "www.example"}
		p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path, Upstreams: one, Routes: suffix("a.example")}})
		p.load(t, hosts{})
		for _, name := range names {
			p.ask(t, name, dns.TypeA)
		}
		for _, c := range []struct {
			what string
			cfg  forward.Config
			want [3]string // step and nameserver of the answer for each name
		}{
			{"nothing", forward.Config{Upstreams: one, Routes: suffix("a.example")}, [3]string{"0.2", "0.1", "0.1"}},
			{"limits", forward.Config{
				Upstreams: one, Routes: suffix("a.example"), CacheSize: 1 << 20,
				ServeStale: -1, Order: forward.OrderFastest,
			}, [3]string{"0.2", "0.1", "0.1"}},
			{"the suffix", forward.Config{Upstreams: one, Routes: suffix("b.example")}, [3]string{"3.1", "3.2", "3.1"}},
			{"other nameservers than the ones of a suffix", forward.Config{Upstreams: three, Routes: suffix("b.example")}, [3]string{"4.3", "4.2", "4.3"}},
			{"no suffix", forward.Config{Upstreams: three}, [3]string{"5.3", "5.3", "5.3"}},
			{"no cache", forward.Config{Upstreams: three, CacheSize: -1}, [3]string{"6.3", "6.3", "6.3"}},
			{"a cache again", forward.Config{Upstreams: three}, [3]string{"7.3", "7.3", "7.3"}},
			{"nothing", forward.Config{Upstreams: three}, [3]string{"7.3", "7.3", "7.3"}},
		} {
			step.Add(1)
			p.configure(t, path, dnsproxy.Config{Forward: c.cfg})
			for i, name := range names {
				want := name + ". A 192.0." + c.want[i]
				if got := outcome(p.ask(t, name, dns.TypeA)); got != want {
					t.Errorf("change %d, %s: %s, want %s", step.Load(), c.what, got, want)
				}
			}
		}
	})
}
