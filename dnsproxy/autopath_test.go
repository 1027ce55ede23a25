package dnsproxy_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestAutopath(t *testing.T) { // N5
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"api.example.com":            external("192.0.2.1", "192.0.2.2", "2001:db8::1"),
		"*.wild.example.com":         external("192.0.2.3"),
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"db.bank.svc.cluster.local":  service("db", "bank", "10.0.0.2"),
	})
	for _, domain := range []string{"shop.svc.cluster.local", "corp.example", "CORP.Example"} {
		long := "api.example.com." + domain + "."
		wild := "B.wild.example.com." + domain + "."
		p.converse(t, []dialogue{
			{long + " A", long + " CNAME api.example.com.; api.example.com. A 192.0.2.1; api.example.com. A 192.0.2.2"},
			{long + " AAAA", long + " CNAME api.example.com.; api.example.com. AAAA 2001:db8::1"},
			{wild + " A", wild + " CNAME B.wild.example.com.; B.wild.example.com. A 192.0.2.3"},
		})
		if domain == "shop.svc.cluster.local" {
			wantAsked(t, 0, fake)
		}
	}
	p.converse(t, []dialogue{
		// A short name, where no FQDN and no shorter expansion matches: the CNAME's target
		// is the FQDN, because systemd-resolved treats a single label as a loop.
		{"web.corp.example A", "web.corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"db.bank.shop.svc.cluster.local A",
			"db.bank.shop.svc.cluster.local. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.2"},
		{"api.example.com.corp.example.corp.example A", forwarded}, // a search domain is appended once
		// A walk through the search list has ended before these names of the cluster.
		{"api.example.com.svc.cluster.local A", forwarded},
	})
	// The nameserver has names below its domain that are mesh names without it.
	fake.Handle(fakedns.Answer("db.bank.corp.example. 60 IN A 192.0.2.9"))
	p.converse(t, []dialogue{
		{"db.bank.corp.example A", "db.bank.corp.example. A 192.0.2.9"}, {"db.bank.corp.example AAAA", "NODATA"},
	})
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	p.converse(t, []dialogue{
		{"web.Corp.example A", "web.Corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
	})
}

func TestPointers(t *testing.T) { // N8
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1", "2001:db8::1"),
		"B.example.com":              external("192.0.2.1", "::ffff:192.0.2.9"),
		"a.example.com":              external("192.0.2.1"),
		"c.example.com":              external("192.0.2.1", "192.0.2.1", "10.0.0.1", "10.0.0.2"),
		"*.example.com":              external("192.0.2.2"),
	})
	const v6 = "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.B.d.0.1.0.0.2.ip6.arpa."
	p.converse(t, []dialogue{
		{"1.0.0.10.in-addr.arpa PTR", "1.0.0.10.in-addr.arpa. PTR web.shop.svc.cluster.local."},
		{v6 + " PTR", v6 + " PTR web.shop.svc.cluster.local."},
	})
	wantAsked(t, 0, fake)
	// Nameservers are asked before external hosts, and not for an address that a Service has, too.
	fake.Handle(fakedns.Answer("2.0.0.10.in-addr.arpa. 60 IN PTR own.example."))
	p.converse(t, []dialogue{
		{"2.0.0.10.in-addr.arpa PTR", "2.0.0.10.in-addr.arpa. PTR own.example."},
		{"9.2.0.192.in-addr.arpa PTR", "9.2.0.192.in-addr.arpa. PTR b.example.com."},
	})
	resp := p.ask(t, "1.2.0.192.in-addr.arpa", dns.TypePTR)
	for i, want := range []string{"a.example.com.", "b.example.com.", "c.example.com."} {
		if len(resp.Answer) != 3 || record(resp.Answer[i]) != "1.2.0.192.in-addr.arpa. PTR "+want {
			t.Fatalf("an address that three entries share:\n%v", resp)
		}
	}
	if !resp.Authoritative || resp.Answer[0].Header().Ttl != 30 {
		t.Errorf("want AA=1 and TTL 30:\n%v", resp)
	}
	p.converse(t, []dialogue{
		{"2.2.0.192.in-addr.arpa PTR", forwarded}, // a wildcard has no FQDN
	})
}
