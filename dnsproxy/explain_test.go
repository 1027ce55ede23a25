package dnsproxy_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
)

func TestExplain(t *testing.T) { // R5
	t.Parallel()
	p := newProxy(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(t, "search shop.svc.cluster.local corp.example")}})
	p.load(t, hosts{
		"web.shop.svc.cluster.local":  service("web", "shop", "10.0.0.1"),
		"api.example.com":             external("192.0.2.1"),
		"*.wild.example.com":          external("192.0.2.2"),
		"peer.shop.svc.cluster.local": withPorts(headless("peer", "shop", "10.0.0.9"), "http=80"),
		"old.shop.svc.cluster.local":  alias("old", "web.shop.svc.cluster.local", "10.0.0.1"),
	})
	const web = "web.shop.svc.cluster.local"
	for _, c := range []struct {
		ask, rows         string
		rule              table.Rule
		host, source, why string
	}{
		{web + " A", "N1 A1", table.RuleExact, web, "table", "in the mesh table: the host's FQDN"},
		{"web a", "N2 A1", table.RuleShortName, web, "table",
			"in the mesh table: short name of " + web},
		{"x.wild.example.com AAAA", "N4 A2", table.RuleWildcard, "*.wild.example.com", "table",
			"in the mesh table: below the wildcard *.wild.example.com"},
		{"web.shop.shop.svc.cluster.local ANY", "N5 N2 A5", table.RuleAutopath, web, "table",
			"in the mesh table: after removing the search domain shop.svc.cluster.local.: short name of " + web},
		{"api.example.com.shop.svc.cluster.local HTTPS", "N5 N1 A3", table.RuleAutopath, "api.example.com", "table",
			"in the mesh table: after removing the search domain shop.svc.cluster.local.: the host's FQDN"},
		{"api.example.com MX", "N1 A4", table.RuleExact, "api.example.com", "upstream",
			"in the mesh table: the host's FQDN; forwarded, because the table has no records of this type"},
		{"old.shop.shop.svc.cluster.local AAAA", "N5 N2 D9 A2", table.RuleAutopath, "old.shop.svc.cluster.local", "table",
			"in the mesh table: after removing the search domain shop.svc.cluster.local.: short name of old.shop.svc.cluster.local, an alias of " + web},
		{"10-0-0-9.peer.shop.shop.svc.cluster.local A", "N5 D21 A1", table.RuleAutopath, "peer.shop.svc.cluster.local", "table",
			"in the mesh table: after removing the search domain shop.svc.cluster.local.: an endpoint of the headless Service peer.shop.svc.cluster.local"},
		{"_http._tcp.peer.shop.shop.svc.cluster.local SRV", "N5 D22", table.RuleAutopath, "peer.shop.svc.cluster.local", "table",
			"in the mesh table: after removing the search domain shop.svc.cluster.local.: a port of the Service peer.shop.svc.cluster.local"},
		{"_http._tcp.peer A", "D22 A1", table.RulePort, "peer.shop.svc.cluster.local", "table",
			"in the mesh table: a port of the Service peer.shop.svc.cluster.local"},
		{"peer SRV", "N2 D22", table.RuleShortName, "peer.shop.svc.cluster.local", "table",
			"in the mesh table: short name of peer.shop.svc.cluster.local"},
		{web + " SRV", "N1 A4", table.RuleExact, web, "table", "in the mesh table: the host's FQDN"},
		{"1.0.0.10.in-addr.arpa PTR", "N8", table.RulePTR, "", "table", "the PTR name of a Service's address"},
		{"1.2.0.192.in-addr.arpa PTR", "N8", table.RulePTR, "", "upstream",
			"in the mesh table: the PTR name of an external host's address, if nameservers do not have 1.2.0.192.in-addr.arpa"},
		{"web.corp.example A", "N5 N2 A1", table.RuleAutopath, web, "upstream",
			"in the mesh table: after removing the search domain corp.example.: short name of " + web + ", if nameservers do not have web.corp.example"},
		{"a.b.wild.example.com A", "N4 A1", table.RuleWildcard, "*.wild.example.com", "upstream",
			"in the mesh table: below the wildcard *.wild.example.com, if nameservers do not have a.b"},
		{"api.example.com.wild.example.com A", "N4", table.RuleWildcard, "*.wild.example.com", "self",
			"below the wildcard *.wild.example.com, but made by a search domain from another mesh name: NXDOMAIN"},
		{"x.peer.shop.svc.cluster.local A", "N9", table.RuleNone, "", "self",
			"not in the mesh table, and such names below cluster.local. are not forwarded: NXDOMAIN"},
		{"_x._tcp.peer.corp.example SRV", "N9", table.RuleNone, "", "upstream",
			"not in the mesh table, and such names below peer.corp.example. are not forwarded: NXDOMAIN, if nameservers do not have _x._tcp.peer.corp.example"},
		{"svc.cluster.local A", "N9", table.RuleNone, "", "self",
			"an ancestor of mesh names: NODATA"},
		{"x.api.example.com A", "N9", table.RuleNone, "", "upstream",
			"not in the mesh table: forwarded"},
		{"localhost A", "N7", table.RuleNone, "", "self",
			"special-use domain name: nametap answers it itself, never from the table"},
	} {
		name, qtype, _ := strings.Cut(c.ask, " ")
		want := dnsproxy.Explanation{
			Name: name + ".", Type: strings.ToUpper(qtype), Rows: strings.Fields(c.rows), Rule: c.rule, Host: c.host, Source: c.source, Why: c.why,
		}
		if diff := cmp.Diff(want, explain(t, p, c.ask)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.ask, diff)
		}
	}
}

func TestExplainBeforeSync(t *testing.T) { // C6
	t.Parallel()
	for _, c := range []struct {
		mode              dnsproxy.BeforeSync
		name, source, why string
	}{
		{dnsproxy.BeforeSyncForward, "example.com", "upstream", "no table yet, and not below the cluster domain: forwarded"},
		{dnsproxy.BeforeSyncForward, "web.shop.svc.cluster.local", "self", "no table yet: the query is held for up to 2s"},
		{dnsproxy.BeforeSyncHold, "example.com", "self", "no table yet: the query is held for up to 2s"},
		{dnsproxy.BeforeSyncServfail, "example.com", "self", "no table of mesh hosts has been received yet"},
	} {
		e := explain(t, newProxy(t, dnsproxy.Config{BeforeSync: c.mode}), c.name+" A")
		if e.Source != c.source || e.Why != c.why || len(e.Rows) != 1 || e.Rows[0] != "C6" || e.Rule != table.RuleNone {
			t.Errorf("%s with before-sync %s: %+v", c.name, c.mode, e)
		}
	}
}

func TestExplainRefuses(t *testing.T) { // R5
	t.Parallel()
	p := newProxy(t, dnsproxy.Config{})
	for _, c := range []struct{ name, qtype, want string }{
		{"example.com", "ADDRESS", `type "ADDRESS"`},
		{"example..com", "A", `name "example..com"`},
		{strings.Repeat("x", 64), "A", "name "},
		{strings.Repeat("x.", 128), "A", "name "}, // 257 bytes on the wire
		{strings.Repeat("x.", 126) + "xx", "A", "name "},
	} {
		if _, err := p.Explain(c.name, c.qtype); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q %s: %v, want an error with %q", c.name, c.qtype, err, c.want)
		}
	}
	if _, err := p.Explain(strings.Repeat("x.", 127), "A"); err != nil { // 255 bytes
		t.Error(err)
	}
}
