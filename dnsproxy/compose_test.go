package dnsproxy_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// authority answers as an authoritative server with these records: AA is set and RA is not. It follows CNAME records.
// The SOA record of its negative answers is that of example., with a MINIMUM of an hour.
func authority(tb testing.TB, texts ...string) fakedns.Handler {
	tb.Helper()
	var records []dns.RR
	for _, text := range append(texts, "example. 86400 IN SOA ns.example. host.example. 1 2 3 4 3600") {
		rr, err := dns.NewRR(text)
		if err != nil {
			tb.Fatal(err)
		}
		records = append(records, rr)
	}
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetRcode(query, dns.RcodeNameError)
		reply.Authoritative, reply.Compress = true, true
		name, qtype := query.Question[0].Name, query.Question[0].Qtype
		for _, rr := range records {
			if !strings.EqualFold(rr.Header().Name, name) {
				continue
			}
			reply.Rcode = dns.RcodeSuccess
			if rr.Header().Rrtype == qtype || rr.Header().Rrtype == dns.TypeCNAME {
				reply.Answer = append(reply.Answer, rr)
			}
			if alias, ok := rr.(*dns.CNAME); ok && qtype != dns.TypeCNAME {
				name, reply.Rcode = alias.Target, dns.RcodeNameError
			}
		}
		if n := len(reply.Answer); n == 0 || reply.Answer[n-1].Header().Rrtype != qtype {
			reply.Ns = records[len(records)-1:]
		}
		return reply
	}
}

// TestComposed asks for names of which the table has one half, and a nameserver the other, also from the cache.
func TestComposed(t *testing.T) { // A4, F1, F8, D9
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, hosts{
			"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
			"pay.example":                external("192.0.2.1"),
			"*.wild.example":             external("192.0.2.2"),
			"ext.shop.svc.cluster.local": alias("ext", "outer.example", "192.0.2.9"),
		})
		fake.Handle(authority(t,
			"to.wild.example. 300 IN CNAME pay.example.",
			"db.corp.example. 300 IN CNAME Web.Shop.svc.cluster.local.",
			"pay.corp.example. 300 IN CNAME pay.example.", "pay.example. 300 IN A 203.0.113.1", `pay.example. 300 IN TXT "x"`,
			"long.corp.example. 300 IN CNAME b.corp.example.", "b.corp.example. 300 IN CNAME c.wild.example.",
			"c.wild.example. 300 IN CNAME d.example.", "d.example. 300 IN A 203.0.113.2",
			"outer.example. 300 IN MX 5 mx.example.",
		))
		const web, pay = "web.shop.svc.cluster.local.", "pay.example."
		for _, c := range []struct{ ask, want string }{
			// A CNAME record of the nameserver leads to a mesh host, whatever the nameserver has behind it.
			{"db.corp.example A", "db.corp.example. CNAME " + web + "; " + web + " A 10.0.0.1"},
			{"DB.corp.example AAAA", "DB.corp.example. CNAME " + web + "; NODATA " + web},
			{"db.corp.example HTTPS", "db.corp.example. CNAME " + web + "; NODATA " + web},
			{"db.corp.example TXT", "db.corp.example. CNAME " + web + "; NODATA " + web},
			{"db.corp.example CNAME", "db.corp.example. CNAME " + web + "; NODATA"},
			{"pay.corp.example A", "pay.corp.example. CNAME " + pay + "; " + pay + " A 192.0.2.1"},
			{"pay.corp.example TXT", "pay.corp.example. CNAME " + pay + "; " + pay + ` TXT "x"`},
			{"long.corp.example A", "long.corp.example. CNAME b.corp.example.; b.corp.example. CNAME c.wild.example.; c.wild.example. A 192.0.2.2"},
			// The name exists; what it lacks is said by the zone.
			{"new.wild.example MX", "NODATA example."},
			{"new.wild.example.corp.example MX", "NODATA new.wild.example.corp.example."},
			{"ext.shop.svc.cluster.local MX", "ext.shop.svc.cluster.local. CNAME outer.example.; outer.example. MX 5 mx.example."},
			{"ext.shop.svc.cluster.local TXT", "ext.shop.svc.cluster.local. CNAME outer.example.; NODATA example."},
			{"ext.shop.svc.cluster.local CNAME", "ext.shop.svc.cluster.local. CNAME outer.example.; NODATA"},
			// Ancestors of mesh names exist.
			{"wild.example A", "NODATA example."},
			{"nothing.example A", forwarded},
			// The CNAME records that lead from the question's name come from both.
			{"to.wild.example TXT", "to.wild.example. CNAME " + pay + "; " + pay + ` TXT "x"`},
		} {
			name, qtype, _ := strings.Cut(c.ask, " ")
			for _, network := range []string{"udp", "tcp", "udp"} {
				resp := p.exchange(t, network, question(name, dns.StringToType[qtype]))
				if got := strings.Replace(outcome(resp), "Web.Shop.svc", "web.shop.svc", 2); !strings.EqualFold(got, c.want) {
					t.Errorf("%s over %s\n got %s\nwant %s", c.ask, network, got, c.want)
				}
				own := strings.HasPrefix(c.want, "NODATA new.wild.example.corp") || strings.HasPrefix(c.ask, "ext.shop.svc.cluster.local CNAME")
				if !resp.RecursionAvailable || resp.Authoritative != own {
					t.Errorf("%s over %s: AA %t, RA %t", c.ask, network, resp.Authoritative, resp.RecursionAvailable)
				}
			}
		}
		fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
		p.converse(t, []dialogue{{"a.wild.example.corp.example TXT", "SERVFAIL"}, {"ext.shop.svc.cluster.local CAA", "SERVFAIL"}})
	})
}

// TestFlagsOfServer checks that a query without RD gets the flags of the nameserver, which it is about.
func TestFlagsOfServer(t *testing.T) { // F1
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, hosts{"pay.example": external("192.0.2.1")})
		fake.Handle(authority(t, "www.example. 300 IN A 203.0.113.1", `pay.example. 300 IN TXT "x"`))
		for _, recursion := range []bool{true, false, true} {
			req := question("www.example", dns.TypeA)
			req.RecursionDesired = recursion
			if resp := p.exchange(t, "udp", req); resp.Authoritative == recursion || resp.RecursionAvailable != recursion || len(resp.Answer) != 1 {
				t.Errorf("RD %t:\n%v", recursion, resp)
			}
			req = question("pay.example.corp.example", dns.TypeTXT) // relayed, and behind a CNAME record
			req.RecursionDesired = recursion
			if got := outcome(p.exchange(t, "udp", req)); got != `pay.example.corp.example. CNAME pay.example.; pay.example. TXT "x"` {
				t.Errorf("RD %t: %s", recursion, got)
			}
		}
	})
}

// TestOwnTTLs checks that replies about names below the cluster domain, or that the table has, are kept as mesh names are.
func TestOwnTTLs(t *testing.T) { // F8, A4
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, hosts{"*.wild.example": external("192.0.2.2")})
		fake.Handle(authority(t, "old.shop.svc.cluster.local. 300 IN A 10.0.0.9", "www.example. 300 IN A 203.0.113.1"))
		for ask, want := range map[string]string{
			"gone.shop.svc.cluster.local A": "30 30", "gone.shop.svc A": "30 30", "old.shop.svc.cluster.local A": "30", "new.wild.example MX": "30 30",
			"www.example A": "300", "no.example A": "86400 3600",
		} {
			for i, network := range []string{"udp", "udp", "tcp"} {
				name, qtype, _ := strings.Cut(ask, " ")
				resp := p.exchange(t, network, question(name, dns.StringToType[qtype]))
				var ttls []string
				for _, rr := range slices.Concat(resp.Answer, resp.Ns) {
					ttls = append(ttls, strconv.Itoa(int(rr.Header().Ttl)))
					if soa, ok := rr.(*dns.SOA); ok {
						ttls = append(ttls, strconv.Itoa(int(soa.Minttl)))
					}
				}
				if i > 0 && ask == "no.example A" {
					want = "3600 3600"
				}
				if got := strings.Join(ttls, " "); got != want {
					t.Errorf("%s over %s: TTLs %s, want %s", ask, network, got, want)
				}
			}
		}
	})
}
