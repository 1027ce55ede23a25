package dnsproxy_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestNAT64(t *testing.T) { // A15
	synctest.Test(t, func(t *testing.T) {
		world := nameserver(t, authority(t, "ipv4only.arpa. 60 IN AAAA 64:ff9b::c000:aa", "to.corp. 60 IN CNAME four.example."))
		cfg := dnsproxy.Config{
			NAT64:   func() (time.Duration, bool) { return time.Hour, true },
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(world)},
		}
		p := start(t, cfg)
		p.load(t, hosts{
			"four.example":               external("192.0.2.1"),
			"six.example":                external("192.0.2.1", "2001:db8::1"),
			"here.example":               external("240.240.0.1", "127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"),
			"mixed.example":              external("192.0.2.1", "240.240.0.1"),
			"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
			"many.example":               external(addrs(1, 1000)...),
		})
		await := func(want string) {
			until(t, want, func() bool { return outcome(p.ask(t, "four.example", dns.TypeAAAA)) == want })
		}
		await("four.example. AAAA 64:ff9b::c000:201")
		const expanded = "four.example.shop.svc.cluster.local. "
		p.converse(t, []dialogue{
			{expanded + "AAAA", expanded + "CNAME four.example.; four.example. AAAA 64:ff9b::c000:201"},
			{"web.shop AAAA", "web.shop. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. AAAA 64:ff9b::a00:1"},
			{"to.corp AAAA", "to.corp. CNAME four.example.; four.example. AAAA 64:ff9b::c000:201"},
			{"six.example AAAA", "six.example. AAAA 2001:db8::1"},
			{"here.example AAAA", "NODATA here.example."},
			{"here.example.shop.svc.cluster.local AAAA", "NODATA here.example.shop.svc.cluster.local."},
			{"mixed.example AAAA", "mixed.example. AAAA 64:ff9b::c000:201"},
			{"four.example ANY", "four.example. A 192.0.2.1"},
		})
		validating := withEDNS(question("four.example", dns.TypeAAAA), 1232)
		validating.CheckingDisabled = true
		if got := outcome(p.exchange(t, "udp", validating)); got != "NODATA four.example." {
			t.Errorf("with CD: %s", got)
		}
		many := question("many.example", dns.TypeAAAA)
		if part, all := p.exchange(t, "udp", many), p.exchange(t, "tcp", many); !part.Truncated || all.Truncated || len(all.Answer) != 1000 {
			t.Errorf("TC=%t over UDP, %d records over TCP", part.Truncated, len(all.Answer))
		}
		if rows := explain(t, p, "four.example AAAA").Rows; !slices.Equal(rows, []string{"N1", "A15"}) {
			t.Errorf("explained by %v", rows)
		}
		for shown, want := range map[string]string{"2001:db8:64::c000:ab": "four.example. AAAA 2001:db8:64::c000:201", "2001:db8::1": "NODATA four.example."} {
			cfg.Forward.Upstreams = servers(nameserver(t, fakedns.Answer("ipv4only.arpa. 60 IN AAAA "+shown)))
			if err := p.Configure(cfg); err != nil {
				t.Fatal(err)
			}
			await(want)
		}
	})
}
