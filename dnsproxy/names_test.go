package dnsproxy_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// startMesh runs a server in namespace shop with the search list of a pod and a nameserver
// that answers NXDOMAIN to everything, so that outcome shows what was forwarded.
func startMesh(t *testing.T, h hosts) (*proxy, *fakedns.Server) {
	t.Helper()
	fake := nameserver(t, fakedns.Answer())
	p := start(t, dnsproxy.Config{
		Forward: forward.Config{ResolvConf: resolvConf(t, "search shop.svc.cluster.local svc.cluster.local Cluster.Local corp.example"),
			Upstreams: servers(fake)},
	})
	p.load(t, h)
	return p, fake
}

func TestExactNames(t *testing.T) { // N1, N9, A1
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"api.example.com":            external("192.0.2.1", "2001:db8::1"),
	})
	p.converse(t, []dialogue{
		{"WEB.Shop.SVC.cluster.LOCAL A", "WEB.Shop.SVC.cluster.LOCAL. A 10.0.0.1"},
		{"api.example.com A", "api.example.com. A 192.0.2.1"},
	})
	for i := range 4 { // RD and CD are the client's
		req := question("api.example.com", dns.TypeAAAA)
		req.RecursionDesired, req.CheckingDisabled = i&1 > 0, i&2 > 0
		want := req.MsgHdr
		want.Response, want.Authoritative, want.RecursionAvailable = true, true, true
		if resp := p.exchange(t, "udp", req); resp.MsgHdr != want || resp.Answer[0].Header().Ttl != 30 {
			t.Errorf("want the header %+v and the TTL 30:\n%v", want, resp)
		}
	}
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{
		{"example.com A", "NODATA example.com."},
		{". A", "NODATA ."},
		{`api\.example.com A`, forwarded}, // one label that contains a dot
		// Below a host, and below a Service whose ports are not known.
		{"x.api.example.com.corp.example A", forwarded},
		{"x.web.shop.svc.cluster.local A", forwarded},
	})
}

func TestShortNames(t *testing.T) { // N2
	t.Parallel()
	p, _ := startMesh(t, hosts{
		"web.shop.svc.cluster.local":       service("web", "shop", "10.0.0.1"),
		"web-0.web.shop.svc.cluster.local": service("web-0.web", "shop", "10.0.0.2"),
		"db.bank.svc.cluster.local":        service("db", "bank", "10.0.0.3"),
		"db-0.db.bank.svc.cluster.local":   service("db-0.db", "bank", "10.0.0.4"),
		"vm.shop.svc.cluster.local":        {Registry: "External", Namespace: "shop", Ips: []string{"10.0.0.5"}},
	})
	p.converse(t, []dialogue{
		{"web A", webAddress},
		{"web.shop A", "web.shop. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"web-0.web.shop A", "web-0.web.shop. CNAME web-0.web.shop.svc.cluster.local.; web-0.web.shop.svc.cluster.local. A 10.0.0.2"},
		{"db-0.db.bank A", "db-0.db.bank. CNAME db-0.db.bank.svc.cluster.local.; db-0.db.bank.svc.cluster.local. A 10.0.0.4"},
		// Another registry: only the FQDN is found.
		{"vm.shop.svc.cluster.local A", "vm.shop.svc.cluster.local. A 10.0.0.5"},
	})
}

func TestWildcards(t *testing.T) { // N4, N6
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"*.corp.example":               external("192.0.2.1"),
		"*.Deep.corp.example":          external("192.0.2.2"),
		"a.deep.corp.example":          external("192.0.2.3"),
		"*.example":                    external("192.0.2.4"),
		"web.shop.svc.cluster.local":   service("web", "shop", "10.0.0.1"),
		"empty.shop.svc.cluster.local": service("empty", "shop"),
	})
	// A client that has the first of the cluster's domains added has written the rest.
	const whole = "A.b.Corp.example."
	p.converse(t, []dialogue{
		{"deep.corp.example A", "deep.corp.example. A 192.0.2.1"}, // a wildcard does not match its suffix
		{"x.deep.corp.example A", "x.deep.corp.example. A 192.0.2.2"},
		{"a.deep.corp.example A", "a.deep.corp.example. A 192.0.2.3"}, // an exact name
		{whole + "shop.svc.cluster.local. A", whole + "shop.svc.cluster.local. CNAME " + whole + "; " + whole + " A 192.0.2.1"},
		// A domain of the search list has made the name from that of a Service.
		{"gone.shop.svc.cluster.local.corp.example A", "NXDOMAIN"},
		{"gone.shop.svc.cluster.local.example A", "NXDOMAIN"},             // also a domain that the agent does not know
		{"web.shop.corp.example A", "web.shop.corp.example. A 192.0.2.1"}, // a walk ends before this
	})
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{
		{"empty.shop.corp.example A", "NODATA empty.shop.corp.example."}, // a walk goes on after NODATA
		{"x.y.deep.corp.example A", "x.y.deep.corp.example. A 192.0.2.2"},
		{"x.a.deep.corp.example AAAA", "NODATA x.a.deep.corp.example."},
		{whole + " A", whole + " A 192.0.2.1"}, {"x.y.example A", "x.y.example. A 192.0.2.4"},
	})
	fake.Handle(fakedns.Answer("www.example.com. 60 IN A 192.0.2.9"))
	p.converse(t, []dialogue{{"www.example.com.corp.example A", "NXDOMAIN"}, {"www.example.com.example A", "NXDOMAIN"}})
	fake.Handle(fakedns.Rcode(dns.RcodeRefused)) // which does not say that there is no www.example.org
	p.converse(t, []dialogue{
		{"www.example.org.corp.example A", "REFUSED"}, {"www.example.org.example A", "www.example.org.example. A 192.0.2.4"},
		{"x.corp.example A", "x.corp.example. A 192.0.2.1"},
	})
	p.load(t, hosts{"*.example": external("192.0.2.4")}) // above the domain
	p.converse(t, []dialogue{{"www.example.org.corp.example A", "REFUSED"}, {"x.corp.example A", "x.corp.example. A 192.0.2.4"}})
}
