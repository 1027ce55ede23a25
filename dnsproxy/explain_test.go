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
	p := newProxy(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(t, "search corp.example")}})
	p.load(t, hosts{
		"web.shop.svc.cluster.local":  service("web", "shop", "10.0.0.1"),
		"api.example.com":             external("192.0.2.1"),
		"*.wild.example.com":          external("192.0.2.2"),
		"peer.shop.svc.cluster.local": withPorts(headless("peer", "shop", "10.0.0.9"), "http=80"),
		"old.shop.svc.cluster.local":  alias("old", "web.shop.svc.cluster.local", "10.0.0.1"),
	})
	const web = "web.shop.svc.cluster.local"
	for _, c := range []struct {
		ask  string
		want dnsproxy.Explanation
	}{
		{web + " A", dnsproxy.Explanation{
			Rows: []string{"N1", "A1"}, Rule: table.RuleExact, Host: web, Source: "table",
			Why: "in the mesh table: the host's FQDN",
		}},
		{"web a", dnsproxy.Explanation{
			Rows: []string{"N2", "A1"}, Rule: table.RuleShortName, Host: web, Source: "table",
			Why: "in the mesh table: short name of " + web,
		}},
		{"x.wild.example.com AAAA", dnsproxy.Explanation{
			Rows: []string{"N4", "A2"}, Rule: table.RuleWildcard, Host: "*.wild.example.com", Source: "table",
			Why: "in the mesh table: below the wildcard *.wild.example.com",
		}},
		{"web.corp.example ANY", dnsproxy.Explanation{
			Rows: []string{"N5", "N2", "A5"}, Rule: table.RuleAutopath, Host: web, Source: "table",
			Why: "in the mesh table: after removing the search domain corp.example.: short name of " + web,
		}},
		{"api.example.com.corp.example HTTPS", dnsproxy.Explanation{
			Rows: []string{"N5", "N1", "A3"}, Rule: table.RuleAutopath, Host: "api.example.com", Source: "table",
			Why: "in the mesh table: after removing the search domain corp.example.: the host's FQDN",
		}},
		{"api.example.com MX", dnsproxy.Explanation{
			Rows: []string{"N1", "A4"}, Rule: table.RuleExact, Host: "api.example.com", Source: "upstream",
			Why: "in the mesh table: the host's FQDN; forwarded, because the table has only addresses",
		}},
		{"old.corp.example AAAA", dnsproxy.Explanation{
			Rows: []string{"N5", "N2", "D9", "A2"}, Rule: table.RuleAutopath, Host: "old.shop.svc.cluster.local", Source: "table",
			Why: "in the mesh table: after removing the search domain corp.example.: short name of old.shop.svc.cluster.local, an alias of " + web,
		}},
		{"10-0-0-9.peer.corp.example A", dnsproxy.Explanation{
			Rows: []string{"N5", "D21", "A1"}, Rule: table.RuleAutopath, Host: "peer.shop.svc.cluster.local", Source: "table",
			Why: "in the mesh table: after removing the search domain corp.example.: an endpoint of the headless Service peer.shop.svc.cluster.local",
		}},
		{"_http._tcp.peer.corp.example SRV", dnsproxy.Explanation{
			Rows: []string{"N5", "D22"}, Rule: table.RuleAutopath, Host: "peer.shop.svc.cluster.local", Source: "table",
			Why: "in the mesh table: after removing the search domain corp.example.: a port of the Service peer.shop.svc.cluster.local",
		}},
		{"_http._tcp.peer A", dnsproxy.Explanation{
			Rows: []string{"D22", "A1"}, Rule: table.RulePort, Host: "peer.shop.svc.cluster.local", Source: "table",
			Why: "in the mesh table: a port of the Service peer.shop.svc.cluster.local",
		}},
		{"peer SRV", dnsproxy.Explanation{
			Rows: []string{"N2", "D22"}, Rule: table.RuleShortName, Host: "peer.shop.svc.cluster.local", Source: "table",
			Why: "in the mesh table: short name of peer.shop.svc.cluster.local",
		}},
		{web + " SRV", dnsproxy.Explanation{
			Rows: []string{"N1", "A4"}, Rule: table.RuleExact, Host: web, Source: "table",
			Why: "in the mesh table: the host's FQDN",
		}},
		{"1.0.0.10.in-addr.arpa PTR", dnsproxy.Explanation{
			Rows: []string{"N8"}, Rule: table.RulePTR, Source: "table", Why: "the PTR name of a mesh host's address",
		}},
		{"x.api.example.com A", dnsproxy.Explanation{
			Rows: []string{"N9"}, Rule: table.RuleNone, Source: "upstream", Why: "not in the mesh table: forwarded",
		}},
		{"localhost A", dnsproxy.Explanation{
			Rows: []string{"N7"}, Rule: table.RuleNone, Source: "self",
			Why: "special-use domain name: nametap answers it itself, never from the table",
		}},
	} {
		name, qtype, _ := strings.Cut(c.ask, " ")
		c.want.Name, c.want.Type = name+".", strings.ToUpper(qtype)
		if diff := cmp.Diff(c.want, explain(t, p, c.ask)); diff != "" {
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
