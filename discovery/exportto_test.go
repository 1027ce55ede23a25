package discovery

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// meshYAML returns the ConfigMap with settings of the mesh.
func meshYAML(settings string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata:\n  mesh: |\n    " + settings + "\n"
}

// exported are hosts of two namespaces, with and without an exportTo.
func exported() []string {
	return []string{
		svcYAML("shop", "web", "10.0.0.1"), svcYAML("data", "db", "10.0.0.2"),
		strings.Replace(svcYAML("data", "all", "10.0.0.3"), "namespace: data", "namespace: data, annotations: {networking.istio.io/exportTo: '*'}", 1),
		entryYAML("ext", "data", "hosts: [ext.example.com]", "addresses: [192.0.2.1]", "resolution: STATIC"),
		entryYAML("open", "data", "hosts: [open.example.com]", "addresses: [192.0.2.2]", "resolution: STATIC", "exportTo: ['*']"),
	}
}

// nextHosts returns the hosts of the table of a client that gets the next push.
func nextHosts(t *testing.T, c client) string {
	t.Helper()
	c.next()
	return strings.ReplaceAll(strings.Join(slices.Sorted(maps.Keys(merged(t, c.state()).GetTable())), " "), ".svc.cluster.local", "")
}

// TestDefaultExportTo checks that the default of the mesh says which namespaces see the Services and
// ServiceEntries without an exportTo, that clients follow its changes.
func TestDefaultExportTo(t *testing.T) { // D1, D11
	const all, own, none = "all.data db.data ext.example.com open.example.com web.shop", "all.data open.example.com web.shop", "all.data open.example.com"
	scopes := []struct{ scope, want string }{{".", own}, {"*", all}, {"~", none}, {"shop", all}, {"other,.", own}}
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	for _, o := range exported() {
		resource := fakekube.Services
		if strings.Contains(o, "ServiceEntry") {
			resource = fakekube.ServiceEntries
		}
		a.Put(resource, o)
	}
	r := start(t, onAPI(t, a))
	clients := map[string]client{variantSotw: open(t, variantSotw, r, node(t, "shop")), variantDelta: open(t, variantDelta, r, node(t, "shop"))}
	expect := func(what, want string) {
		t.Helper()
		for variant, c := range clients {
			if got := nextHosts(t, c); got != want {
				t.Errorf("%s, %s: %q, want %q", variant, what, got, want)
			}
		}
	}
	expect("no settings", all)
	for _, tt := range scopes {
		a.Put(fakekube.ConfigMaps, meshYAML("defaultServiceExportTo: ['"+strings.ReplaceAll(tt.scope, ",", "', '")+"']"))
		expect(tt.scope, tt.want)
	}
	a.Remove(fakekube.ConfigMaps, "istio-system/istio")
	expect("no settings any more", all)
}

// TestRootNamespace checks that the default Sidecar is in the root namespace of the mesh's
// settings, or else of the flag.
func TestRootNamespace(t *testing.T) { // D12
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, strings.Replace(entryDefinition, "serviceentries", "sidecars", 1))
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("data", "db", "10.0.0.2"))
	a.Put(fakekube.Sidecars, sidecarYAML("default", "root", "egress: [{hosts: ['data/*']}]"))
	a.Put(fakekube.Sidecars, sidecarYAML("default", "other", "egress: [{hosts: ['shop/*']}]"))
	cfg := onAPI(t, a)
	cfg.RootNamespace = "root"
	c := open(t, variantDelta, start(t, cfg), node(t, "shop"))
	expect := func(what, want string) {
		t.Helper()
		if got := nextHosts(t, c); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	expect("the flag's", "db.data")
	a.Put(fakekube.ConfigMaps, strings.Replace(meshYAML("rootNamespace: other"), "istio-system", "root", 1))
	expect("the settings'", "web.shop")
	a.Put(fakekube.ConfigMaps, strings.Replace(meshYAML("rootNamespace: none"), "istio-system", "root", 1))
	expect("one without a Sidecar", "db.data web.shop")
}
