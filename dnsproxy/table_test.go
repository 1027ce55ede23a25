package dnsproxy_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/table"
)

// contested returns a push in which several entries claim one name; every element is a
// NameTable, since a NameTable holds a key once.
func contested() []hosts {
	return []hosts{
		{
			"web.shop.svc.cluster.local":       service("web", "shop", "10.0.0.1"),
			"Web.shop.svc.cluster.local":       external("10.0.0.2"),
			"web.shop.svc.cluster.local.":      service("web", "shop", "10.0.0.3"),
			"api.example.com":                  external("192.0.2.1"),
			"API.example.com":                  external("192.0.2.2"),
			"api.example.com.":                 external("192.0.2.3"),
			"db.shop":                          external("192.0.2.4"),
			"db.shop.svc.cluster.local":        service("db", "shop", "10.0.0.4"),
			"web-0.web.shop.svc.cluster.local": service("web-0.web", "shop", "10.0.0.5"),
			"web-0.web.svc.cluster.local":      service("web-0", "web", "10.0.0.6"),
			"*.wild.example.com":               external("192.0.2.5"),
			"*.Wild.example.com":               external("192.0.2.6"),
			"db.wild.example.com":              external("192.0.2.7"),
			"bad key":                          external("192.0.2.8"),
		},
		{
			"twice.example":               external("192.0.2.9"),
			"old.shop.svc.cluster.local":  alias("old", "b.example", "10.0.0.12"),
			"web.bank.svc.cluster.local":  service("web", "bank", "10.0.0.10"),
			"peer.bank.svc.cluster.local": withPorts(headless("peer", "bank", "10.0.0.13"), "http=80", "=53/UDP"),
		},
		{
			"twice.example":               external("192.0.2.10"),
			"old.shop.svc.cluster.local":  alias("old", "a.example", "10.0.0.12"),
			"web.bank.svc.cluster.local":  {Registry: "External", Namespace: "bank", Ips: []string{"10.0.0.11"}},
			"peer.bank.svc.cluster.local": withPorts(headless("peer", "bank", "10.0.0.13"), "http=81"),
		},
	}
}

// The answers do not depend on the order of the push.
func TestPrecedence(t *testing.T) { // N7
	t.Parallel()
	p, _ := startMesh(t, hosts{})
	push := [][]byte{hosts{"gone.peer.bank": external("192.0.2.13"), "*.peer.bank": external("192.0.2.13")}.wire(t)}
	for _, h := range contested() {
		push = append(push, h.wire(t))
	}
	if err := p.Load(split(t, push...)); err != nil {
		t.Fatal(err)
	}
	p.converse(t, []dialogue{
		// Kubernetes wins, then the smaller key.
		{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 10.0.0.1"},
		{"web.bank.svc.cluster.local A", "web.bank.svc.cluster.local. A 10.0.0.10"},
		{"api.example.com A", "api.example.com. A 192.0.2.2"},
		{"x.wild.example.com A", "x.wild.example.com. A 192.0.2.6"},
		// An explicit host wins over a wildcard, and a short name of a Service over both.
		{"db.wild.example.com A", "db.wild.example.com. A 192.0.2.7"},
		{"db.shop A", "db.shop. CNAME db.shop.svc.cluster.local.; db.shop.svc.cluster.local. A 10.0.0.4"},
		{"db.shop.svc A", "db.shop.svc. CNAME db.shop.svc.cluster.local.; db.shop.svc.cluster.local. A 10.0.0.4"},
		// name.namespace wins over name in the agent's namespace.
		{"web-0.web A", "web-0.web. CNAME web-0.web.svc.cluster.local.; web-0.web.svc.cluster.local. A 10.0.0.6"},
		{"twice.example A", "twice.example. A 192.0.2.9"},
		{"_http._tcp.peer.bank SRV", "_http._tcp.peer.bank. CNAME _http._tcp.peer.bank.svc.cluster.local.; _http._tcp.peer.bank.svc.cluster.local. SRV 0 100 81 10-0-0-13.peer.bank.svc.cluster.local."},
		{"gone.peer.bank A", "NXDOMAIN"}, // a pod that may come back
		{"other.peer.bank.shop.svc.cluster.local A", "NXDOMAIN"},
		{"old A", "old. CNAME old.shop.svc.cluster.local.; old.shop.svc.cluster.local. CNAME a.example.; a.example. A 10.0.0.12"},
	})
	want := []table.Collision{
		{Name: "*.wild.example.com.", Winner: "*.Wild.example.com", Loser: "*.wild.example.com"},
		{Name: "api.example.com.", Winner: "API.example.com", Loser: "api.example.com"},
		{Name: "api.example.com.", Winner: "API.example.com", Loser: "api.example.com."},
		{Name: "db.shop.", Winner: "db.shop.svc.cluster.local", Loser: "db.shop"},
		{Name: "old.shop.svc.cluster.local.", Winner: "old.shop.svc.cluster.local", Loser: "old.shop.svc.cluster.local"},
		{Name: "peer.bank.svc.cluster.local.", Winner: "peer.bank.svc.cluster.local", Loser: "peer.bank.svc.cluster.local"},
		{Name: "twice.example.", Winner: "twice.example", Loser: "twice.example"},
		{Name: "web-0.web.", Winner: "web-0.web.svc.cluster.local", Loser: "web-0.web.shop.svc.cluster.local"},
		{Name: "web.bank.svc.cluster.local.", Winner: "web.bank.svc.cluster.local", Loser: "web.bank.svc.cluster.local"},
		{Name: "web.shop.svc.cluster.local.", Winner: "web.shop.svc.cluster.local", Loser: "web.shop.svc.cluster.local."},
	}
	if diff := cmp.Diff(want, p.Table().Collisions()); diff != "" {
		t.Errorf("collisions (-want +got):\n%s", diff)
	}
	if got := p.count(t, "nametap_table_collisions"); got != float64(len(want)) {
		t.Errorf("%v collisions are counted, want %d", got, len(want))
	}
}

// tableText returns everything that a table's methods return, as text.
func tableText(t *testing.T, current *table.Table) string {
	t.Helper()
	var lines []string
	for key, info := range current.Infos {
		lines = append(lines, fmt.Sprint(key, info.GetIps(), info.GetRegistry(), info.GetShortname(), info.GetNamespace(), info.GetAlias(), info.GetHeadless(), info.GetPorts()))
	}
	slices.Sort(lines)
	return fmt.Sprintf("%d\n%s\n%v\n%v", current.Len(), strings.Join(lines, "\n"), current.Collisions(), current.Skipped())
}

func TestKeys(t *testing.T) { // N10
	t.Parallel()
	label := strings.Repeat("l", 63)
	long := strings.Repeat("x.", 126) + "x" // 255 bytes on the wire
	logger, log := newLog()
	p := start(t, dnsproxy.Config{Logger: logger})
	p.load(t, hosts{
		"dotted.example.":          external("192.0.2.1"),
		"MiXeD.Example":            external("192.0.2.2"),
		"xn--bcher-kva.example":    external("192.0.2.3"),
		label + ".example":         external("192.0.2.4"),
		long:                       external("192.0.2.5"),
		"_srv.under_score.example": external("192.0.2.6"),
		"single":                   external("192.0.2.7"),
		"1.2.3.4":                  external("192.0.2.8"),
		"*.dotted.wild.example.":   external("192.0.2.9"),
		"partly.example":           external("192.0.2.10", "no address", "2001:db8::1", "192.0.2.300", "fe80::1%eth0", "0.0.0.0", ""),
		"*." + long[:len(long)-2]:  external("192.0.2.11"),
		"":                         external("192.0.2.12"),
		".":                        external("192.0.2.12"),
		"*":                        external("192.0.2.12"),
		"*.":                       external("192.0.2.12"),
		"*..":                      external("192.0.2.12"),
		"a..example":               external("192.0.2.12"),
		".example":                 external("192.0.2.12"),
		"a.example..":              external("192.0.2.12"),
		"a b.example":              external("192.0.2.12"),
		"bücher.example":           external("192.0.2.12"),
		"a.*.example":              external("192.0.2.12"),
		"*a.example":               external("192.0.2.12"),
		"l" + label + ".example":   external("192.0.2.12"),
		long + "x":                 external("192.0.2.12"),
		"*." + long:                external("192.0.2.12"),
		`a\.b.example`:             external("192.0.2.12"),
		"http://example":           external("192.0.2.12"),
	})
	p.converse(t, []dialogue{
		{"dotted.example A", "dotted.example. A 192.0.2.1"},
		{"mixed.example A", "mixed.example. A 192.0.2.2"},
		{"xn--bcher-kva.example A", "xn--bcher-kva.example. A 192.0.2.3"},
		{"XN--Bcher-kva.example A", "XN--Bcher-kva.example. A 192.0.2.3"},
		{label + ".example A", label + ".example. A 192.0.2.4"},
		{long + " A", long + ". A 192.0.2.5"},
		{"_srv.under_score.example A", "_srv.under_score.example. A 192.0.2.6"},
		{"single A", "single. A 192.0.2.7"},
		{"1.2.3.4 A", "1.2.3.4. A 192.0.2.8"},
		{"x.dotted.wild.example A", "x.dotted.wild.example. A 192.0.2.9"},
		{"partly.example A", "partly.example. A 192.0.2.10"},
		{"partly.example AAAA", "partly.example. AAAA 2001:db8::1"},
		{"w." + long[2:] + " A", "w." + long[2:] + ". A 192.0.2.11"},
	})
	want := map[string]int{ // times that a key is listed
		"": 1, ".": 1, "*": 1, "*.": 1, "*..": 1, "a..example": 1, ".example": 1, "a.example..": 1, "a b.example": 1,
		"bücher.example": 1, "a.*.example": 1, "*a.example": 1, "l" + label + ".example": 1, long + "x": 1, "*." + long: 1,
		`a\.b.example`: 1, "http://example": 1, "partly.example": 5,
	}
	got := map[string]int{}
	total := 0
	for _, skip := range p.Table().Skipped() {
		got[skip.Key]++
		total++
		if skip.Reason == "" {
			t.Errorf("%q is left out without a reason", skip.Key)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if counted := p.count(t, "nametap_table_skipped"); counted != float64(total) {
		t.Errorf("%v left out are counted, want %d", counted, total)
	}
	if p.Table().Len() != 11 || p.count(t, "nametap_table_hosts") != 11 {
		t.Errorf("%d hosts, want 11", p.Table().Len())
	}
	if !strings.Contains(log.String(), `key=.example reason="not a valid name: a label is empty"`) {
		t.Errorf("the log does not name the key:\n%s", log)
	}
	if lines := strings.Count(log.String(), `msg="left out of the table`); lines != 21 || !strings.Contains(log.String(), "count=2") {
		t.Errorf("%d lines, want 20 and one with the count of the rest:\n%s", lines, log)
	}
}

func TestNameTable(t *testing.T) { // R5
	t.Parallel()
	cluster, err := table.NewCluster("Shop", "shop.svc.cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	table, err := table.Empty(cluster).With(split(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.2", "2001:db8::1", "10.0.0.1", "10.0.0.2"),
		"DB.bank.svc.cluster.local":  service("DB", "bank", "10.0.0.3"),
		"old.cluster.local":          service("old", "bank", "10.0.0.4"),
		"API.example.com":            external("192.0.2.1"),
		"*.example.com":              withDestinations(external("192.0.2.2"), "443"),
		"vip.example.com":            withDestinations(external("240.240.0.1"), "443", "80:8080", "3306 db.example.com:3306 192.0.2.8:3306 [2001:db8::8]:3307"),
		"ext.bank.svc.cluster.local": {Ips: []string{"192.0.2.1"}, Registry: "Kubernetes", Shortname: "ext", Namespace: "bank", Alias: "api.example.com."},
		"peer.bank.svc.cluster.local": {Ips: []string{"10.0.0.5", "10.0.0.6"}, Registry: "Kubernetes", Shortname: "peer", Namespace: "bank",
			Headless: true, Ports: []*api.NameTable_Port{{Name: "HTTP", Number: 80, Protocol: "TCP"}, {Number: 53, Protocol: "udp", Ips: []string{"10.0.0.6"}}}},
		"web.shop": external("192.0.2.3"),
	}.wire(t)))
	if err != nil {
		t.Fatal(err)
	}
	want := `{
		"*.example.com": {"ips": ["192.0.2.2"], "registry": "External", "destinations": [{"port": 443}]},
		"vip.example.com": {"ips": ["240.240.0.1"], "registry": "External", "destinations": [{"port": 443}, {"port": 80, "target": 8080},
			{"port": 3306, "endpoints": ["db.example.com:3306", "192.0.2.8:3306", "[2001:db8::8]:3307"]}]},
		"api.example.com": {"ips": ["192.0.2.1"], "registry": "External"},
		"db.bank.svc.cluster.local": {"ips": ["10.0.0.3"], "registry": "Kubernetes", "shortname": "db", "namespace": "bank"},
		"ext.bank.": {"ips": ["192.0.2.1"], "registry": "Kubernetes"},
		"ext.bank.svc.": {"ips": ["192.0.2.1"], "registry": "Kubernetes"},
		"ext.bank.svc.cluster.local": {"ips": ["192.0.2.1"], "registry": "Kubernetes", "shortname": "ext", "namespace": "bank",
			"alias": "api.example.com"},
		"peer.bank.": {"ips": ["10.0.0.5", "10.0.0.6"], "registry": "Kubernetes"},
		"peer.bank.svc.": {"ips": ["10.0.0.5", "10.0.0.6"], "registry": "Kubernetes"},
		"peer.bank.svc.cluster.local": {"ips": ["10.0.0.5", "10.0.0.6"], "registry": "Kubernetes", "shortname": "peer", "namespace": "bank",
			"headless": true, "ports": [{"name": "http", "number": 80}, {"number": 53, "protocol": "UDP", "ips": ["10.0.0.6"]}]},
		"db.bank.": {"ips": ["10.0.0.3"], "registry": "Kubernetes"},
		"db.bank.svc.": {"ips": ["10.0.0.3"], "registry": "Kubernetes"},
		"old.cluster.local": {"ips": ["10.0.0.4"], "registry": "Kubernetes", "shortname": "old", "namespace": "bank"},
		"web.": {"ips": ["10.0.0.1", "10.0.0.2", "2001:db8::1"], "registry": "Kubernetes"},
		"web.shop.": {"ips": ["10.0.0.1", "10.0.0.2", "2001:db8::1"], "registry": "Kubernetes"},
		"web.shop.svc.": {"ips": ["10.0.0.1", "10.0.0.2", "2001:db8::1"], "registry": "Kubernetes"},
		"web.shop.svc.cluster.local": {"ips": ["10.0.0.1", "10.0.0.2", "2001:db8::1"], "registry": "Kubernetes",
			"shortname": "web", "namespace": "shop"}
	}`
	text, err := protojson.Marshal(&api.NameTable{Table: maps.Collect(table.Infos)})
	if err != nil {
		t.Fatal(err)
	}
	var got, expected any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(`{"table": `+want+`}`), &expected); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(expected, got); diff != "" {
		t.Errorf("NameTable (-want +got):\n%s", diff)
	}
}

func TestNewClusterRefuses(t *testing.T) { // R7
	t.Parallel()
	long := strings.TrimSuffix(strings.Repeat("x.", 125), ".") // 251 bytes on the wire
	for _, c := range []struct{ namespace, domain, want string }{
		{"shop", "", `domain ""`},
		{"shop", "cluster..local", `domain "cluster..local"`},
		{"a.b", "cluster.local", `namespace "a.b"`},
		{"*", "cluster.local", `namespace "*"`},
		{"shop", long + ".x", "domain "},
		{"shop", long[2*2:], `namespace "shop"`},
		{strings.Repeat("n", 63), long[2*20:], "namespace "},
	} {
		_, err := table.NewCluster(c.namespace, c.domain)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("namespace %q, domain %q: %v", c.namespace, c.domain, err)
		}
		_, err = dnsproxy.New(dnsproxy.Config{Namespace: c.namespace, Domain: c.domain})
		if (err == nil) != (c.domain == "") { // a Config's zero value means the default
			t.Errorf("namespace %q, domain %q: New: %v", c.namespace, c.domain, err)
		}
	}
}
