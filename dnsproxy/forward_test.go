package dnsproxy_test

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// startForwarder runs a server with an empty table.
func startForwarder(tb testing.TB, cfg dnsproxy.Config) *proxy {
	tb.Helper()
	p := start(tb, cfg)
	p.load(tb, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	return p
}

// deadServer returns an address without a listener.
func deadServer(tb testing.TB) upstream.Spec {
	tb.Helper()
	fake := fakedns.Start(tb, fakedns.Silence)
	fake.Close()
	return servers(fake)[0]
}

// If all servers are dead the query fails at once, even if one is listed twice, and the reason names the server.
func TestDeadServers(t *testing.T) { // F3
	synctest.Test(t, func(t *testing.T) {
		dead := deadServer(t)
		good := nameserver(t, anywhere("192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append([]upstream.Spec{dead}, servers(good)...)}})
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
		p = startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{dead, dead}}})
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
			e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, dead.String()) {
			t.Errorf("want SERVFAIL that names the server:\n%v", resp)
		}
		if asked := p.count(t, "istio_agent_dns_upstream_requests_total"); asked != 1 {
			t.Errorf("one dead server was asked %v times", asked)
		}
	})
}

func TestNoUpstream(t *testing.T) { // F7
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{})
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
			e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, "no nameserver") {
			t.Errorf("want SERVFAIL and why:\n%v", resp)
		}
		if resp := p.ask(t, "www.example", dns.TypeA); resp.Rcode != dns.RcodeServerFailure || len(resp.Extra) > 0 || resp.Authoritative || !resp.RecursionAvailable {
			t.Errorf("without EDNS: want a plain SERVFAIL:\n%v", resp)
		}
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}

// A query beyond the bound takes the place of the oldest one, which is refused; mesh names, and names in the cache, are
// answered.
func TestMaxInflight(t *testing.T) { // F10
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		holding, asked := held(anywhere("192.0.2.1"), release)
		fake := nameserver(t, except("cached.example.", anywhere("192.0.2.1"), holding))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), MaxInflight: 1}})
		cached := []dialogue{{"cached.example A", "cached.example. A 192.0.2.1"}, {"web A", webAddress}}
		p.converse(t, cached)
		conn := p.dial(t, "tcp")
		defer conn.Close()
		for _, name := range []string{"first.example", "second.example"} {
			packet, err := withEDNS(question(name, dns.TypeA), 1232).Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
			<-asked
		}
		resp := parse(t, read(t, conn))
		if e := ede(resp); resp.Question[0].Name != "first.example." || resp.Rcode != dns.RcodeServerFailure || e == nil ||
			!strings.Contains(e.ExtraText, "too many") {
			t.Errorf("want SERVFAIL for the first query and why:\n%v", resp)
		}
		p.converse(t, cached)
		close(release)
		if got := outcome(parse(t, read(t, conn))); got != "second.example. A 192.0.2.1" {
			t.Errorf("the second query: %s", got)
		}
	})
}

// A long reason does not exceed the response's limit.
func TestLongReason(t *testing.T) { // A9
	synctest.Test(t, func(t *testing.T) {
		var dead []upstream.Spec
		for port := range 12 {
			dead = append(dead, upstream.Spec{Addr: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(port+1))})
		}
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: dead}})
		packet, err := withEDNS(question(strings.Repeat("x.", 127), dns.TypeA), 512).Pack()
		if err != nil {
			t.Fatal(err)
		}
		resp := p.send(t, "udp", packet)
		if e := ede(parse(t, resp)); len(resp) > 512 || e == nil {
			t.Errorf("%d bytes:\n%v", len(resp), parse(t, resp))
		}
	})
}
