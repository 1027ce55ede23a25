package dnsproxy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestHeader(t *testing.T) { // A1
	t.Parallel()
	p := start(t, dnsproxy.Config{TTL: 7 * time.Second, Forward: forward.Config{ResolvConf: resolvConf(t, "search corp.example")}})
	p.load(t, hosts{"api.example.com": external("192.0.2.1", "2001:db8::1")})
	for bits := range 32 {
		req := question("api.example.com.corp.example", []uint16{dns.TypeA, dns.TypeAAAA}[bits&1])
		req.RecursionDesired = bits&2 != 0
		req.CheckingDisabled = bits&4 != 0
		req.AuthenticatedData = bits&8 != 0
		req.Zero = bits&16 != 0
		resp := p.exchange(t, "udp", req)
		want := dns.MsgHdr{
			Id: req.Id, Response: true, Authoritative: true, RecursionAvailable: true,
			RecursionDesired: req.RecursionDesired, CheckingDisabled: req.CheckingDisabled,
		}
		if resp.MsgHdr != want {
			t.Errorf("query %+v\n got %+v\nwant %+v", req.MsgHdr, resp.MsgHdr, want)
		}
		if !slices.Equal(resp.Question, req.Question) || len(resp.Answer) != 2 || len(resp.Ns)+len(resp.Extra) != 0 {
			t.Errorf("want the question, a CNAME and an address:\n%v", resp)
		}
		for _, rr := range resp.Answer {
			if h := rr.Header(); h.Ttl != 7 || h.Class != dns.ClassINET {
				t.Errorf("want TTL 7 and class IN: %v", rr)
			}
		}
	}
	resp := p.ask(t, "nowhere.example", dns.TypeA)
	if resp.Authoritative || !resp.RecursionAvailable {
		t.Errorf("a SERVFAIL of nametap: want AA=0, RA=1:\n%v", resp)
	}
}

func TestNoData(t *testing.T) { // A2
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"six.example.com":            external("2001:db8::1"),
	})
	p.converse(t, []dialogue{
		{"web.shop.svc.cluster.local AAAA", "NODATA web.shop.svc.cluster.local."},
		{"WEB AAAA", "NODATA WEB."},
		{"six.example.com A", "NODATA six.example.com."},
		{"Six.example.com.corp.example A", "NODATA Six.example.com.corp.example."},
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

func TestServiceBinding(t *testing.T) { // A3
	t.Parallel()
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"api.example.com":            external("192.0.2.1"),
		"*.wild.example.com":         external("192.0.2.2"),
	})
	for _, qtype := range []string{" HTTPS", " SVCB"} {
		p.converse(t, []dialogue{
			{"web" + qtype, "NODATA web."},
			{"api.example.com" + qtype, "NODATA api.example.com."},
			{"x.wild.example.com" + qtype, "NODATA x.wild.example.com."},
			{"api.example.com.corp.example" + qtype, "NODATA api.example.com.corp.example."},
		})
	}
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{{"other.example.com HTTPS", forwarded}})
}

func TestOtherTypes(t *testing.T) { // A4
	still(t, func(t *testing.T) {
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
				"web":                        "NODATA web.",
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
			{"api.example.com MX", "NODATA"}, // the nameserver's answer, without nametap's SOA
			{"new.example.com.corp.example TXT", "NODATA new.example.com.corp.example."},
		})
		fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
		p.converse(t, []dialogue{{"new.example.com TXT", "SERVFAIL"}})
	})
}

func TestANY(t *testing.T) { // A5
	t.Parallel()
	p, _ := startMesh(t, hosts{
		"api.example.com": external("192.0.2.1", "2001:db8::1", "192.0.2.2"),
		"four.example":    external("192.0.2.3"),
	})
	const both = "api.example.com. A 192.0.2.1; api.example.com. A 192.0.2.2; api.example.com. AAAA 2001:db8::1"
	p.converse(t, []dialogue{
		{"api.example.com ANY", both},
		{"api.example.com.corp.example ANY", "api.example.com.corp.example. CNAME api.example.com.; " + both},
		{"four.example ANY", "four.example. A 192.0.2.3"},
	})
}

func TestCaseIsKept(t *testing.T) { // A6
	t.Parallel()
	p, _ := startMesh(t, hosts{
		"*.example.com":              external("192.0.2.1"),
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
	})
	for _, name := range []string{
		"wEb.", "WEB.sHoP.", "web.SHOP.svc.cluster.LOCAL.", "aBcDeF.eXaMpLe.CoM.",
		`a\.b\\\"\(\@\000\255Z.Example.com.`, "_dmarc._TCP.example.COM.",
	} {
		for _, network := range []string{"udp", "tcp"} {
			req := question(name, dns.TypeA)
			packet, err := req.Pack()
			if err != nil {
				t.Fatal(err)
			}
			resp := p.send(t, network, packet)
			asked := packet[12:]
			if len(resp) < len(packet) || !slices.Equal(resp[12:len(packet)], asked) {
				t.Errorf("%s over %s: the question came back as % x", name, network, resp)
			}
			msg := parse(t, resp)
			if len(msg.Answer) != 1 || msg.Answer[0].Header().Name != parse(t, packet).Question[0].Name {
				t.Errorf("%s over %s:\n%v", name, network, msg)
			}
		}
	}
}

// Endpoints of the agent's cluster come before other clusters' endpoints, each in random order.
func TestNearFirst(t *testing.T) { // D25, A7, A9
	t.Parallel()
	p := start(t, dnsproxy.Config{})
	many := headless("many", "shop", append(addrs(1, 40), addrs(101, 40)...)...)
	both := headless("both", "shop", "10.0.0.9", "2001:db8::9", "10.0.0.8", "10.0.0.9", "10.0.0.1", "2001:db8::1")
	many.Near, both.Near = 40, 3
	p.load(t, hosts{"many.shop.svc.cluster.local": many, "both.shop.svc.cluster.local": both})
	seen := map[string]bool{}
	for range 50 {
		for name, want := range map[string][2]string{"both A": {"10.0.0.8 10.0.0.9", "10.0.0.1"}, "both AAAA": {"2001:db8::9", "2001:db8::1"}} {
			host, qtype, _ := strings.Cut(name, " ")
			var got []string
			for _, rr := range p.ask(t, host, dns.StringToType[qtype]).Answer {
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
		resp := p.ask(t, "many", dns.TypeA)
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

func TestEDNS(t *testing.T) { // A8
	t.Parallel()
	p, _ := startMesh(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT} {
		if resp := p.ask(t, "web", qtype); resp.IsEdns0() != nil {
			t.Errorf("an OPT that was not asked for:\n%v", resp)
		}
		for _, do := range []bool{false, true} {
			req := question("web", qtype).SetEdns0(1400, do)
			opt := req.IsEdns0()
			opt.Option = []dns.EDNS0{
				&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("unknown")},
				&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"},
			}
			resp := p.exchange(t, "udp", req)
			if got := resp.IsEdns0(); got == nil || got.Do() != do || got.UDPSize() != 1232 || len(got.Option) > 0 ||
				got.Version() != 0 || resp.Rcode != dns.RcodeSuccess {
				t.Errorf("DO=%v: want an OPT record of nametap:\n%v", do, resp)
			}
		}
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

func TestSizes(t *testing.T) { // A9
	t.Parallel()
	p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(t, "search corp.example")}})
	many := addrs(1, 150)
	for i := range 150 {
		many = append(many, fmt.Sprintf("2001:db8::%x", i+1))
	}
	p.load(t, hosts{"many.example.com": external(many...)})
	for _, c := range []struct{ edns, limit int }{
		{0, 512}, {100, 512}, {512, 512}, {800, 800}, {1232, 1232}, {4096, 1232}, {65535, 1232},
	} {
		for _, name := range []string{"many.example.com", "many.example.com.corp.example"} {
			for qtype, length := range map[uint16]int{dns.TypeA: 16, dns.TypeAAAA: 28, dns.TypeANY: 28} {
				req := question(name, qtype)
				if c.edns > 0 {
					withEDNS(req, uint16(c.edns))
				}
				packet, err := req.Pack()
				if err != nil {
					t.Fatal(err)
				}
				short := p.send(t, "udp", packet)
				resp := parse(t, short)
				resp.Compress = true
				if len(short) > c.limit || len(short)+length <= c.limit || !resp.Truncated || resp.Len() != len(short) {
					t.Errorf("%s %s, EDNS %d: %d bytes of records in %d, TC=%v; want at most %d, cut after a record, TC=1",
						name, dns.TypeToString[qtype], c.edns, resp.Len(), len(short), resp.Truncated, c.limit)
				}
				whole := p.exchange(t, "tcp", req)
				want := 150
				if qtype == dns.TypeANY {
					want = 300
				}
				if _, autopath := whole.Answer[0].(*dns.CNAME); autopath {
					want++
				}
				if whole.Truncated || len(whole.Answer) != want {
					t.Errorf("%s over TCP: %d records, TC=%v", name, len(whole.Answer), whole.Truncated)
				}
			}
		}
	}
}
