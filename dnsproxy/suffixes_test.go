package dnsproxy_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// bypassHosts are hosts below corp.example, and others.
func bypassHosts() hosts {
	return hosts{
		"api.corp.example":           external("10.0.0.1"),
		"*.wild.corp.example":        external("10.0.0.2"),
		"api.example.com":            external("10.0.0.3"),
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.4"),
		"db.bank.svc.cluster.local":  service("db", "bank", "10.0.0.5"),
	}
}

// None of the names of a host below a bypassed suffix is answered from the table.
func TestBypassedHost(t *testing.T) { // F12, N2, N5, N8
	synctest.Test(t, func(t *testing.T) {
		corp := nameserver(t, anywhere("192.0.2.1"))
		table := bypassHosts()
		table["other.shop.svc.cluster.local"] = service("other", "shop", "10.0.0.5") // shares its address with db.bank
		p := start(t, dnsproxy.Config{
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(corp)}, Bypass: []string{"shop.svc.cluster.local", "corp.example"},
		})
		bypassed := []dialogue{{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 192.0.2.1"}}
		p.converse(t, bypassed) // also before there is a table
		p.load(t, table)
		for _, name := range []string{
			"web.shop.svc.cluster.local", "web.shop.svc", "web.shop", "web", "api.corp.example", "x.wild.corp.example",
		} {
			p.converse(t, []dialogue{{name + " A", name + ". A 192.0.2.1"}})
			if e := explain(t, p, name+" A"); fmt.Sprint(e.Rows) != "[F12]" || e.Source != "upstream" {
				t.Errorf("%s is explained by %v from %s: %s", name, e.Rows, e.Source, e.Why)
			}
		}
		p.converse(t, []dialogue{
			{"db.bank A", "db.bank. CNAME db.bank.svc.cluster.local.; db.bank.svc.cluster.local. A 10.0.0.5"},
			{"5.0.0.10.in-addr.arpa PTR", "5.0.0.10.in-addr.arpa. PTR db.bank.svc.cluster.local."},
		})
		corp.Reset()
		p.ask(t, "4.0.0.10.in-addr.arpa", dns.TypePTR)
		wantAsked(t, 1, corp)
	})
}

// The longest matching suffix of the settings decides.
func TestBypassAndLocalOnly(t *testing.T) { // F12
	t.Parallel()
	corp := nameserver(t, anywhere("192.0.2.1"))
	p := start(t, dnsproxy.Config{
		Forward:   forward.Config{Upstreams: servers(corp)},
		Bypass:    []string{"corp.example", "open.secret.corp.example", "both.example"},
		LocalOnly: []string{"secret.corp.example", "both.example"},
	})
	p.load(t, hosts{"api.secret.corp.example": external("10.0.0.1")})
	p.converse(t, []dialogue{
		{"a.corp.example A", "a.corp.example. A 192.0.2.1"},
		{"api.secret.corp.example A", "api.secret.corp.example. A 10.0.0.1"},
		{"a.secret.corp.example A", "NXDOMAIN"},
		{"a.open.secret.corp.example A", "a.open.secret.corp.example. A 192.0.2.1"},
		{"both.example A", "both.example. A 192.0.2.1"},
	})
}
