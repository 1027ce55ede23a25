package dnsproxy_test

import (
	"testing"

	"github.com/miekg/dns"
)

func TestAutopath(t *testing.T) { // N5
	t.Parallel()
	nick := service("db", "bank", "10.0.0.2")
	//nolint:staticcheck // Istio's control planes up to 1.9 still fill it.
	nick.AltHosts = []string{"nick"}
	p, fake := startMesh(t, hosts{
		"api.example.com":            external("192.0.2.1", "192.0.2.2", "2001:db8::1"),
		"*.wild.example.com":         external("192.0.2.3"),
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"db.bank.svc.cluster.local":  nick,
	})
	for _, domain := range []string{
		"shop.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example", "CORP.Example",
	} {
		long := "api.example.com." + domain + "."
		wild := "a.B.wild.example.com." + domain + "."
		p.converse(t, []dialogue{
			{long + " A", long + " CNAME api.example.com.; api.example.com. A 192.0.2.1; api.example.com. A 192.0.2.2"},
			{long + " AAAA", long + " CNAME api.example.com.; api.example.com. AAAA 2001:db8::1"},
			{wild + " A", wild + " CNAME a.B.wild.example.com.; a.B.wild.example.com. A 192.0.2.3"},
			{wild + " AAAA", "NODATA " + wild},
			{"API.Example.com." + domain + " A", "API.Example.com." + domain + ". CNAME API.Example.com.; " +
				"API.Example.com. A 192.0.2.1; API.Example.com. A 192.0.2.2"},
		})
	}
	p.converse(t, []dialogue{
		// A short name, where no FQDN and no shorter expansion matches: the CNAME's target
		// is the FQDN, because systemd-resolved treats a single label as a loop.
		{"web.corp.example A", "web.corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"WEB.Corp.example AAAA", "NODATA WEB.Corp.example."},
		{"db.bank.corp.example A", "db.bank.corp.example. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.2"},
		{"db.bank.svc.corp.example A", "db.bank.svc.corp.example. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.2"},
		{"db.bank.shop.svc.cluster.local A",
			"db.bank.shop.svc.cluster.local. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.2"},
		{"nick.corp.example A", "nick.corp.example. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.2"},
		{"web.shop.svc.cluster.local.corp.example A",
			"web.shop.svc.cluster.local.corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		// A mesh name without a search domain needs no CNAME.
		{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 10.0.0.1"},
		{"db.bank.svc.cluster.local A", "db.bank.svc.cluster.local. A 10.0.0.2"},
	})
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{
		{"corp.example A", forwarded},
		{"shop.svc.cluster.local A", "NODATA shop.svc.cluster.local."},
		{"wild.example.com.corp.example A", forwarded},
		{"api.example.com.other.example A", forwarded},
		{"api.example.com.xcorp.example A", forwarded},
		{"api.example.com.corp.example.corp.example A", forwarded}, // a search domain is appended once
	})
}

func TestPointers(t *testing.T) { // N8
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1", "2001:db8::1"),
		"B.example.com":              external("192.0.2.1", "::ffff:192.0.2.9"),
		"a.example.com":              external("192.0.2.1"),
		"c.example.com":              external("192.0.2.1", "192.0.2.1"),
		"*.example.com":              external("192.0.2.2"),
	})
	const v6 = "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.B.d.0.1.0.0.2.ip6.arpa."
	p.converse(t, []dialogue{
		{"1.0.0.10.in-addr.arpa PTR", "1.0.0.10.in-addr.arpa. PTR web.shop.svc.cluster.local."},
		{"1.0.0.10.IN-ADDR.arpa PTR", "1.0.0.10.IN-ADDR.arpa. PTR web.shop.svc.cluster.local."},
		{"1.0.0.10.in-addr.arpa ANY", "1.0.0.10.in-addr.arpa. PTR web.shop.svc.cluster.local."},
		{"1.0.0.10.in-addr.arpa A", "NODATA 1.0.0.10.in-addr.arpa."},
		{v6 + " PTR", v6 + " PTR web.shop.svc.cluster.local."},
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
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{
		{"2.2.0.192.in-addr.arpa PTR", forwarded}, // a wildcard has no FQDN
		{"2.0.0.10.in-addr.arpa PTR", forwarded},
		{"0.0.10.in-addr.arpa PTR", forwarded},
		{"1.1.0.0.10.in-addr.arpa PTR", forwarded},
		{"01.0.0.10.in-addr.arpa PTR", forwarded},
		{"257.0.0.10.in-addr.arpa PTR", forwarded},
		{"b._dns-sd._udp.0.0.0.10.in-addr.arpa PTR", forwarded},
		{"in-addr.arpa PTR", forwarded},
		{"ip6.arpa PTR", forwarded},
		{"0." + v6[2:] + " PTR", forwarded},
		{"10." + v6[2:] + " PTR", forwarded},
		{"g." + v6[2:] + " PTR", forwarded},
		{v6[2:] + " PTR", forwarded},
		{"api.example.net PTR", forwarded},
	})
}
