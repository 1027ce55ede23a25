package dnsproxy_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// loopback6 is the PTR name of ::1.
var loopback6 = "1." + strings.Repeat("0.", 31) + "ip6.arpa"

// Special-use names are answered by nametap: with any table, before the first one, and over both transports. Each kind of
// name stands here once.
func TestSpecialNamesAreAnswered(t *testing.T) { // N7
	t.Parallel()
	world := nameserver(t, anywhere("192.0.2.1"))
	for _, loaded := range []bool{false, true} {
		p := start(t, dnsproxy.Config{
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(world)}, BeforeSync: dnsproxy.BeforeSyncHold,
			Bypass: []string{"arpa"}, LocalOnly: []string{"example"},
		})
		if loaded {
			p.load(t, hosts{
				"localhost": external("10.0.0.1"), "*.onion": external("10.0.0.1"), "a.onion": external("10.0.0.1"),
				"self.example": external("127.0.0.1", "::1", "127.0.0.9"), "*.arpa": external("10.0.0.1"),
				"_dns.resolver.arpa": external("10.0.0.1"),
			})
		}
		p.converse(t, []dialogue{
			{"localhost A", "localhost. A 127.0.0.1"},
			{"localhost ANY", "localhost. A 127.0.0.1; localhost. AAAA ::1"},
			{"a.b.localhost TXT", "NODATA localhost."},
			{"0.127.IN-ADDR.arpa PTR", "NODATA 127.IN-ADDR.arpa."},
			{loopback6 + " PTR", loopback6 + ". PTR localhost."},
			{"0" + loopback6[1:] + " PTR", "NODATA 0" + loopback6[1:] + "."},
			{"_dns.resolver.arpa SVCB", "NODATA resolver.arpa."},
		})
		for name, zone := range map[string]string{
			"invalid": ".", "a.Invalid": ".", "onion": ".", "expyuzz4wqqyqhjn.onion": ".", "a.onion": ".",
			"9.0.0.127.in-addr.arpa": "127.in-addr.arpa.", "x." + loopback6: loopback6 + ".",
		} {
			for _, network := range []string{"udp", "tcp"} {
				for _, qtype := range []uint16{dns.TypeA, dns.TypePTR, dns.TypeSOA} {
					resp := p.exchange(t, network, withEDNS(question(name, qtype), 1232))
					if got := negative(t, resp); got != "NXDOMAIN "+zone || !resp.Authoritative || resp.IsEdns0() == nil {
						t.Errorf("%s %s: %s, want NXDOMAIN %s", name, dns.TypeToString[qtype], got, zone)
					}
				}
			}
		}
	}
	wantAsked(t, 0, world)
}

// Names that only resemble special-use names are forwarded, and so are PTR names of private
// addresses, for which the nameservers of resolv.conf have the site's names.
func TestNotSpecialNames(t *testing.T) { // N7, N8, N9
	synctest.Test(t, func(t *testing.T) {
		world := nameserver(t, anywhere("192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{
			// A setting that names a special-use zone has precedence.
			Forward: forward.Config{Upstreams: servers(world), Routes: []forward.Route{{Suffix: "onion", Servers: servers(world)}}},
			Bypass:  []string{"lab.invalid"},
		})
		names := []string{
			"localhost.example", "notlocalhost", "invalid.example", "x.test", "x.example", "x.local", "x.home.arpa", "x.alt",
			"9.0.0.10.in-addr.arpa", "1.1.168.192.in-addr.arpa", "1.1.16.172.in-addr.arpa", "1.0.64.100.in-addr.arpa",
			"254.169.254.169.in-addr.arpa", "1.2.0.192.in-addr.arpa", "255.255.255.in-addr.arpa", "128.in-addr.arpa",
			"2." + loopback6[2:], loopback6[2:], "d.f.ip6.arpa", "ipv4only.arpa", "arpa", "notresolver.arpa",
			"a.lab.invalid", "a.onion",
		}
		for _, name := range names {
			p.converse(t, []dialogue{{name + " A", name + ". A 192.0.2.1"}})
		}
		wantAsked(t, len(names), world)
		p.converse(t, []dialogue{{"b.invalid A", "NXDOMAIN"}})
	})
}

// A zone transfer of a mesh name is refused: a table is not a zone, and a mesh name is not
// forwarded.
func TestTransferIsRefused(t *testing.T) { // A4, A13, N7
	synctest.Test(t, func(t *testing.T) {
		world := nameserver(t, anywhere("192.0.2.1"))
		p := start(t, dnsproxy.Config{
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(world)}, LocalOnly: []string{"db.example"}, Bypass: []string{"bypassed.example"},
		})
		p.load(t, hosts{
			"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
			"api.example.com":            external("10.0.0.2"),
			"*.wild.example.com":         external("10.0.0.3"),
			"bypassed.example":           external("10.0.0.4"),
		})
		refused := []string{
			"web.shop.svc.cluster.local", "web", "web.corp.example", "api.example.com", "x.wild.example.com", "api.example.com.corp.example",
			"db.example", "nope.db.example", "localhost", "invalid", "127.in-addr.arpa", "1.0.0.10.in-addr.arpa", "svc.cluster.local",
		}
		for _, qtype := range []uint16{dns.TypeAXFR, dns.TypeIXFR} {
			for _, name := range refused {
				for _, network := range []string{"udp", "tcp"} {
					resp := p.exchange(t, network, withEDNS(question(name, qtype), 1232))
					if e := ede(resp); resp.Rcode != dns.RcodeRefused || len(resp.Answer)+len(resp.Ns) > 0 || e == nil || resp.Authoritative {
						t.Errorf("%s %s over %s: want REFUSED and why:\n%v", name, dns.TypeToString[qtype], network, resp)
					}
				}
			}
		}
		// Secondaries send their SOA record.
		req := new(dns.Msg).SetIxfr("api.example.com.", 1, "ns.example.com.", "h.example.com.")
		if resp := p.exchange(t, "tcp", req); resp.Rcode != dns.RcodeRefused {
			t.Errorf("IXFR with an SOA: want REFUSED:\n%v", resp)
		}
		wantAsked(t, 0, world)
		if e := explain(t, p, "api.example.com AXFR"); !slices.Equal(e.Rows, []string{"N1", "A4"}) || e.Source != "self" {
			t.Errorf("explained by %v from %s: %s", e.Rows, e.Source, e.Why)
		}
		// Transfers of all other zones, also of zones that contain mesh names, are forwarded.
		for _, name := range []string{"example.com", "bypassed.example"} {
			world.Reset()
			p.exchange(t, "tcp", question(name, dns.TypeAXFR))
			if asked := world.Queries(); len(asked) != 1 {
				t.Errorf("AXFR of %s: asked %v", name, asked)
			}
		}
	})
}
