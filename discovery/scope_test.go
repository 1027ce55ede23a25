package discovery

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

func sidecarYAML(name, namespace, spec string) string {
	return fmt.Sprintf("---\napiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: %s, namespace: %s}\nspec: {%s}\n", name, namespace, spec)
}

// scoped are hosts of three namespaces, one of them with pods.
func scoped() string {
	return svcYAML("shop", "web", "10.0.0.1") + svcYAML("shop", "api", "10.0.0.2, ports: [{port: 81}]") + svcYAML("data", "db", "None") + svcYAML("data", "cache", "10.0.0.4") +
		"---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: db, namespace: data, labels: {kubernetes.io/service-name: db}}\n" +
		"addressType: IPv4\nendpoints: [{addresses: [10.1.0.1], hostname: db-0}]\n" +
		"---\n" + entryYAML("ext", "edge", "hosts: [a.example.com, '*.wild.example.com']", "addresses: [192.0.2.1]", "resolution: STATIC")
}

// TestSidecars checks which hosts a workload with the label app: web of namespace shop sees.
func TestSidecars(t *testing.T) { // D12
	const db, web, api, cache, external, wild = "db-0.db.data db.data", "web.shop", "api.shop", "cache.data", "a.example.com", "*.wild.example.com"
	for _, tt := range []struct{ name, sidecars, want string }{
		{"none", "", join(wild, external, api, cache, db, web)},
		{"its namespace", sidecarYAML("s", "shop", "egress: [{hosts: ['./*']}]"), join(api, web)},
		{"all namespaces", sidecarYAML("s", "shop", "egress: [{hosts: ['*/*']}]"), join(wild, external, api, cache, db, web)},
		{"several listeners", sidecarYAML("s", "shop", "egress: [{hosts: [data/cache.data.svc.cluster.local]}, {hosts: [./web.shop.svc.cluster.local]}]"), join(cache, web)},
		{"excluded hosts", sidecarYAML("s", "shop", "egress: [{hosts: ['*/*', '~data/db.data.svc.cluster.local', '~/*.example.com', '~./api.shop.svc.cluster.local']}]"), join(cache, web)},
		{"a port", sidecarYAML("s", "shop", "egress: [{port: {number: 81, protocol: HTTP, name: p}, hosts: ['*/*']}]"), api},
		{"a port, and any port", sidecarYAML("s", "shop", "egress: [{port: {number: 81}, hosts: ['data/*', './api.shop.svc.cluster.local']}, {hosts: ['data/*', '~data/db.data.svc.cluster.local']}]"), join(api, cache)},
		{"an HTTP proxy", sidecarYAML("s", "shop", "egress: [{port: {number: 3128, protocol: http_proxy, name: p}, hosts: ['data/*', '~/db.data.svc.cluster.local']}, {hosts: ['./*', '~/*']}]"), cache},
		{"no namespace", sidecarYAML("s", "shop", "egress: [{hosts: ['~/*']}]"), ""},
		{"a pod with its Service", sidecarYAML("s", "shop", "egress: [{hosts: ['*/db.data.svc.cluster.local']}]"), db},
		{"another namespace's host", sidecarYAML("s", "shop", "egress: [{hosts: [shop/cache.data.svc.cluster.local]}]"), ""},
		{"another case, as with istiod", sidecarYAML("s", "shop", "egress: [{hosts: ['edge/A.example.COM']}]"), ""},
		{"below a suffix", sidecarYAML("s", "shop", "egress: [{hosts: ['*/*.example.com']}]"), join(wild, external)},
		{"no egress", sidecarYAML("s", "shop", "ingress: []"), join(wild, external, api, cache, db, web)},
		{"another namespace", sidecarYAML("s", "data", "egress: [{hosts: ['./*']}]"), join(wild, external, api, cache, db, web)},
		{"the root namespace", sidecarYAML("s", "istio-system", "egress: [{hosts: ['data/*']}]"), join(cache, db)},
		{"the workload's namespace in the root namespace", sidecarYAML("s", "istio-system", "egress: [{hosts: ['./*']}]"), join(api, web)},
		{"the root namespace's own workloads", sidecarYAML("s", "istio-system", "workloadSelector: {labels: {app: web}}, egress: [{hosts: ['data/*']}]"), join(wild, external, api, cache, db, web)},
		{"the namespace before the root", sidecarYAML("s", "istio-system", "egress: [{hosts: ['data/*']}]") + sidecarYAML("s", "shop", "egress: [{hosts: ['./*']}]"), join(api, web)},
		{"selected", sidecarYAML("a", "shop", "egress: [{hosts: ['./*']}]") + sidecarYAML("b", "shop", "workloadSelector: {labels: {app: web}}, egress: [{hosts: ['data/*']}]"), join(cache, db)},
		{"selected twice", sidecarYAML("a", "shop", "workloadSelector: {labels: {app: web}}, egress: [{hosts: ['data/*']}]") + sidecarYAML("b", "shop", "workloadSelector: {labels: {app: web, v: '1'}}, egress: [{hosts: ['./*']}]"), join(cache, db)},
		{"not selected", sidecarYAML("b", "shop", "workloadSelector: {labels: {app: web, tier: x}}, egress: [{hosts: ['data/*']}]"), join(wild, external, api, cache, db, web)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table, err := Client{Namespace: "shop", Labels: map[string]string{"app": "web", "v": "1"}}.table(allOf(parse(t, scoped()+tt.sidecars)))
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(strings.Join(slices.Sorted(maps.Keys(table.GetTable())), " "), ".svc.cluster.local", ""); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// D12: an egress listener or a label that is not understood shows nothing, also while a directory has no good form of its Sidecar.
func TestSidecarNotUnderstood(t *testing.T) {
	for listener, wrong := range map[string]string{
		"hosts: ['*/*'], labels: {app: web}": "labels", "hosts: ['*/*'], port: {number: http}": "number", "hosts: ['*/*', '~data/-']": "hosts[1]",
	} {
		dir := t.TempDir()
		write(t, dir, "a.yaml", scoped()+sidecarYAML("s", "shop", "egress: [{"+listener+"}, {hosts: [./web.shop.svc.cluster.local, -]}]")+sidecarYAML("s", "data", "workloadSelector: {labels: {app: web, version: 2}}"))
		table, errs, err := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "shop"})
		named := func(e object.Error) bool { return strings.HasSuffix(e.Field, wrong) }
		other, _, _ := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "data", Labels: map[string]string{"app": "web"}})
		if len(other.GetTable()) > 0 || len(table.GetTable()) != 1 || table.GetTable()["web.shop.svc.cluster.local"] == nil || !slices.ContainsFunc(errs, named) {
			t.Errorf("%s: %v, %v, %v, %v", listener, table, other, errs, err)
		}
	}
}

// D11, D12: the recipe in operations.md shows each namespace the names that it says.
func TestNamesThatTenantsSee(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, recipe, _ := strings.Cut(string(text), "### Names that a tenant may see")
	recipe, _, _ = strings.Cut(recipe, "\n## ")
	yaml := svcYAML("default", "kubernetes", "10.0.0.1") + svcYAML("platform", "login", "10.0.0.2") + svcYAML("platform", "admin", "10.0.0.3") +
		svcYAML("shop", "web", "10.0.0.4") + svcYAML("bank", "api", "10.0.0.5")
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(recipe, -1)
	if len(blocks) != 2 {
		t.Fatalf("the recipe has %d blocks of YAML, want 2", len(blocks))
	}
	all := allOf(parse(t, yaml+"---\n"+blocks[0][1]+"---\n"+blocks[1][1]))
	for namespace, want := range map[string]string{
		"shop": "billing.example.com kubernetes.default login.platform web.shop", "bank": "api.bank kubernetes.default login.platform",
	} {
		table, err := Client{Namespace: namespace}.table(all)
		if got := strings.ReplaceAll(join(slices.Sorted(maps.Keys(table.GetTable()))...), ".svc.cluster.local", ""); got != want || err != nil {
			t.Errorf("%s sees %s, want %s: %v", namespace, got, want, err)
		}
	}
}

func join(hosts ...string) string { return strings.Join(hosts, " ") }
