package dnsproxy_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// clientSearch is the search list of a pod's client, with ndots:5.
var clientSearch = []string{"shop.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"}

// getaddrinfo queries like glibc with ndots:5: name with each domain of the search list,
// then name itself. It returns the outcome of the first response with an address.
func getaddrinfo(tb testing.TB, p *proxy, name string) string {
	tb.Helper()
	for _, domain := range append(slices.Clone(clientSearch), "") {
		resp := p.ask(tb, name+"."+domain, dns.TypeA)
		if resp.Rcode == dns.RcodeSuccess && len(resp.Answer) > 0 {
			return outcome(resp)
		}
	}
	return "not found"
}

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

// A bypassed name is answered by the nameservers, whichever expansion the client's resolver
// queries first.
func TestBypassThroughTheSearchList(t *testing.T) { // F12, N5
	t.Parallel()
	for _, c := range []struct {
		name      string
		localOnly []string
	}{
		{name: "mesh"},
		{name: "local-only", localOnly: []string{"svc.cluster.local"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			corp := nameserver(t, fakedns.Answer("api.corp.example. 60 IN A 192.0.2.1",
				"x.wild.corp.example. 60 IN A 192.0.2.2", "intra.corp.example. 60 IN A 192.0.2.3"))
			p := start(t, dnsproxy.Config{
				Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(corp)}, Bypass: []string{"Corp.example."},
				LocalOnly: c.localOnly,
			})
			p.load(t, bypassHosts())
			for name, want := range map[string]string{
				"api.corp.example": "192.0.2.1", "API.Corp.Example": "192.0.2.1", "x.wild.corp.example": "192.0.2.2",
				"intra": "192.0.2.3", // the suffix is also a search domain
				"web":   "10.0.0.4", "db.bank": "10.0.0.5", "api.example.com": "10.0.0.3",
			} {
				got := getaddrinfo(t, p, name)
				if len(got) < len(want) || got[len(got)-len(want):] != want {
					t.Errorf("%s: %s, want %s", name, got, want)
				}
			}
			for _, q := range corp.Queries() {
				if len(c.localOnly) > 0 && dns.IsSubDomain(c.localOnly[0], q.Name) {
					t.Errorf("%s left, below a suffix that is local only", q.Name)
				}
			}
		})
	}
}

// None of the names of a host below a bypassed suffix is answered from the table.
func TestBypassedHost(t *testing.T) { // F12, N2, N5, N8
	still(t, func(t *testing.T) {
		corp := nameserver(t, anywhere("192.0.2.1"))
		nick := service("web", "shop", "10.0.0.4")
		//nolint:staticcheck // Istio's control planes up to 1.9 still fill it.
		nick.AltHosts = []string{"nick"}
		table := bypassHosts()
		table["web.shop.svc.cluster.local"] = nick
		table["other.shop.svc.cluster.local"] = service("other", "shop", "10.0.0.5") // shares its address with db.bank
		p := start(t, dnsproxy.Config{
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(corp)}, Bypass: []string{"shop.svc.cluster.local", "corp.example"},
		})
		p.load(t, table)
		for _, name := range []string{
			"web.shop.svc.cluster.local", "web.shop.svc", "web.shop", "web", "nick", "nick.cluster.local", "web.shop.cluster.local",
			"web.svc.cluster.local", "api.corp.example.svc.cluster.local", "x.wild.corp.example.cluster.local",
		} {
			p.converse(t, []dialogue{{name + " A", name + ". A 192.0.2.1"}})
			if e := explain(t, p, name+" A"); fmt.Sprint(e.Rows) != "[F12]" || e.Source != "upstream" {
				t.Errorf("%s is explained by %v from %s: %s", name, e.Rows, e.Source, e.Why)
			}
		}
		p.converse(t, []dialogue{
			{"db.bank A", "db.bank. A 10.0.0.5"},
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
