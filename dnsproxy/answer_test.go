package dnsproxy_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// Types that the table does not have are NODATA, with an SOA record by which the answer may be kept; ANY has all that it has.
func TestNoData(t *testing.T) { // A2, A3, A5
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"six.example.com":            external("2001:db8::1"),
	})
	p.converse(t, []dialogue{
		{"web.shop.svc.cluster.local AAAA", "NODATA web.shop.svc.cluster.local."},
		{"WEB AAAA", "NODATA WEB."},
		{"six.example.com A", "NODATA six.example.com."},
		{"Six.example.com.shop.svc.cluster.local A", "NODATA Six.example.com.shop.svc.cluster.local."},
		{"web HTTPS", "NODATA web."}, {"web SVCB", "NODATA web."}, {"six.example.com HTTPS", "NODATA six.example.com."},
		{"web ANY", webAddress},
	})
	resp := p.ask(t, "web", dns.TypeAAAA)
	if soa, ok := resp.Ns[0].(*dns.SOA); !ok || soa.Hdr.Ttl != 30 || soa.Minttl != 30 ||
		!dns.IsSubDomain("cluster.local.", soa.Ns) || !dns.IsSubDomain("cluster.local.", soa.Mbox) {
		t.Errorf("want an SOA by which the answer may be kept for 30 s:\n%v", resp)
	}
	if !resp.Authoritative || !resp.RecursionAvailable {
		t.Errorf("want AA=1, RA=1:\n%v", resp)
	}
	wantAsked(t, 0, fake)
}

func TestOtherTypes(t *testing.T) { // A4
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, hosts{
			"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
			"api.example.com":            external("192.0.2.1"),
			"new.example.com":            external("192.0.2.2"),
		})
		fake.Handle(fakedns.Answer(`api.example.com. 60 IN TXT "hello"`))
		types := []string{"TXT", "MX", "SRV", "CAA", "NS", "SOA", "CNAME", "NAPTR", "PTR", "DS", "TYPE65280"}
		for _, qtype := range types {
			code := dns.StringToType[qtype]
			if qtype == "TYPE65280" {
				code = 65280
			}
			for name, want := range map[string]string{
				"web.shop.svc.cluster.local": "NODATA web.shop.svc.cluster.local.",
				"new.example.com":            "NODATA new.example.com.", // NXDOMAIN from the nameserver
			} {
				if got := outcome(p.ask(t, name, code)); got != want {
					t.Errorf("%s %s\n got %s\nwant %s", name, qtype, got, want)
				}
			}
		}
		for _, q := range fake.Queries() {
			if strings.Contains(q.Name, "web") {
				t.Errorf("a Kubernetes name was forwarded: %v", q)
			}
		}
		wantAsked(t, len(types), fake)
		p.converse(t, []dialogue{
			{"api.example.com TXT", `api.example.com. TXT "hello"`},
			{"api.example.com MX", "NODATA api.example.com."}, // the nameserver's answer has no SOA record
			{"web TXT", "NODATA web."}, {"web CNAME", "web. CNAME web.shop.svc.cluster.local.; NODATA"},
			{"new.example.com.corp.example TXT", "NODATA new.example.com.corp.example."},
		})
		fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
		p.converse(t, []dialogue{{"new.example.com TXT", "SERVFAIL"}})
	})
}

// Endpoints of the agent's cluster come before other clusters' endpoints, each in random order.
func TestNearFirst(t *testing.T) { // D25, A7, A9
	t.Parallel()
	p := start(t, dnsproxy.Config{})
	many := headless("many", "shop", append(addrs(1, 40), addrs(101, 40)...)...)
	both := headless("both", "shop", "10.0.0.9", "2001:db8::9", "10.0.0.8", "10.0.0.9", "10.0.0.1", "2001:db8::1")
	many.Near, both.Near = 40, 3
	const domain = ".shop.svc.cluster.local"
	p.load(t, hosts{"many" + domain: many, "both" + domain: both})
	seen := map[string]bool{}
	for range 50 {
		for name, want := range map[string][2]string{"both A": {"10.0.0.8 10.0.0.9", "10.0.0.1"}, "both AAAA": {"2001:db8::9", "2001:db8::1"}} {
			host, qtype, _ := strings.Cut(name, " ")
			var got []string
			for _, rr := range p.ask(t, host+domain, dns.StringToType[qtype]).Answer {
				got = append(got, strings.Fields(rr.String())[4])
			}
			seen[strings.Join(got, " ")] = true
			near := strings.Count(want[0], " ") + 1
			slices.Sort(got[:near])
			if strings.Join(got[:near], " ") != want[0] || strings.Join(got[near:], " ") != want[1] {
				t.Fatalf("%s: %q, want %q first and %q then", name, got, want[0], want[1])
			}
		}
		// Not all fit: the ones that do are of the agent's cluster.
		resp := p.ask(t, "many"+domain, dns.TypeA)
		if n := len(resp.Answer); !resp.Truncated || n == 0 || n > 40 {
			t.Fatalf("%d records, truncated %t", n, resp.Truncated)
		}
		for _, rr := range resp.Answer {
			if a, ok := rr.(*dns.A); !ok || a.A.To4()[1] != 1 {
				t.Fatalf("%v is in a truncated answer", rr)
			}
		}
	}
	if len(seen) != 3 {
		t.Errorf("the orders %v, want both of 10.0.0.8 and 10.0.0.9", seen)
	}
}

func TestBadEDNS(t *testing.T) { // A8
	t.Parallel()
	p, fake := startMesh(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	for _, name := range []string{"web", "other.example"} {
		req := question(name, dns.TypeA).SetEdns0(1232, true)
		req.IsEdns0().SetVersion(1)
		resp := p.exchange(t, "udp", req)
		if opt := resp.IsEdns0(); resp.Rcode != dns.RcodeBadVers || opt == nil || opt.Version() != 0 || !opt.Do() ||
			len(resp.Answer) > 0 {
			t.Errorf("version 1: want BADVERS:\n%v", resp)
		}
		req = question(name, dns.TypeA).SetEdns0(1232, false).SetEdns0(1232, false)
		if resp := p.exchange(t, "udp", req); resp.Rcode != dns.RcodeFormatError {
			t.Errorf("two OPT records: want FORMERR:\n%v", resp)
		}
	}
	wantAsked(t, 0, fake)
}
