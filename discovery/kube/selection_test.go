package kube_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// serviceOf returns a Service of a namespace.
func serviceOf(namespace, name string) string {
	return strings.Replace(service(name, "10.96.0.1"), "namespace: shop", "namespace: "+namespace, 1)
}

// namespaceOf returns a namespace with labels.
func namespaceOf(name, labels string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {%s}}\n", name, labels)
}

// The settings of the mesh are objects, too.
const meshObject = "ConfigMap istio-system/istio"

// D13: only the objects of namespaces that a discovery selector matches are there, and a change of the selectors or of a
// namespace's labels is followed. The objects of other namespaces stay meanwhile.
func TestDiscoverySelectors(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.ConfigMaps, mesh("discoverySelectors: [{matchLabels: {mesh: enabled, tier: web}}, {matchExpressions: [{key: team, operator: In, values: [a, b]}]}]"))
	a.Put(fakekube.Namespaces, namespaceOf("shop", "mesh: enabled, tier: web"))
	a.Put(fakekube.Namespaces, namespaceOf("half", "mesh: enabled"))
	a.Put(fakekube.Namespaces, namespaceOf("other", "team: c"))
	a.Put(fakekube.Definitions, definition)
	for _, namespace := range []string{"shop", "half", "other"} {
		a.Put(fakekube.Services, serviceOf(namespace, "web"))
	}
	a.Put(fakekube.ServiceEntries, entry("kept", "hosts: [a.example.com], addresses: [192.0.2.1]"))
	a.Put(fakekube.ServiceEntries, strings.Replace(entry("api", "hosts: [b.example.com], addresses: [192.0.2.2]"), "namespace: shop", "namespace: other", 1))
	s := start(t, a)
	shop := []string{meshObject, "Service shop/web", "ServiceEntry shop/kept"}
	with := func(objects ...string) []string {
		all := append(slices.Clone(shop), objects...)
		slices.Sort(all)
		return all
	}
	s.want(with()...)
	a.Put(fakekube.Namespaces, namespaceOf("other", "team: b"))
	s.want(with("Service other/web", "ServiceEntry other/api")...)

	// Other selectors, broken ones, and none.
	a.Put(fakekube.ConfigMaps, mesh("discoverySelectors: [{matchLabels: {mesh: enabled}}]"))
	s.want(with("Service half/web")...)
	a.Put(fakekube.ConfigMaps, mesh("discoverySelectors: [{matchLabels: {mesh: '!'}}]"))
	wait.Until(t, "the broken settings are named", func() bool { return len(s.Read().Errors) == 1 })
	s.want(with("Service half/web")...)
	a.Remove(fakekube.ConfigMaps, "istio-system/istio")
	shop = shop[1:]
	s.want(with("Service half/web", "Service other/web", "ServiceEntry other/api")...)
	if slices.ContainsFunc(s.Status(), func(st source.Status) bool { return st.Resource == "labels of namespaces" }) {
		t.Error("the labels of namespaces are still followed")
	}
	for key := range s.removed {
		if key.Namespace == "shop" {
			t.Errorf("%s was removed at times", key)
		}
	}
}

// D13: after many changes of selectors, labels and objects, one right after the other, the objects
// of the namespaces that count are there, and objects of a namespace that always counts were never
// removed.
func TestSelectionFollowsEverything(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2) {
		random := rand.New(rand.NewPCG(seed, 0))
		a := fakekube.Start(t)
		a.Put(fakekube.Namespaces, namespaceOf("shop", "always: here"))
		a.Put(fakekube.Services, serviceOf("shop", "web"))
		labels, services, selected := map[string]string{}, map[string]bool{}, ""
		choose := func(value string) {
			if selected = value; value == "" {
				a.Put(fakekube.ConfigMaps, mesh("{}"))
			} else {
				a.Put(fakekube.ConfigMaps, mesh("discoverySelectors: [{matchLabels: {team: "+value+"}}, {matchLabels: {always: here}}]"))
			}
		}
		choose("a")
		s := start(t, a)
		s.want(meshObject, "Service shop/web")
		for range 300 {
			namespace := fmt.Sprintf("n%d", random.IntN(4))
			switch random.IntN(20) {
			case 0:
				choose([]string{"", "a", "b"}[random.IntN(3)])
			case 1:
				a.EndWatches()
			case 2:
				delete(labels, namespace)
				a.Remove(fakekube.Namespaces, "/"+namespace)
			case 3, 4, 5, 6, 7, 8:
				labels[namespace] = []string{"a", "b", "c"}[random.IntN(3)]
				a.Put(fakekube.Namespaces, namespaceOf(namespace, "team: "+labels[namespace]))
			case 9, 10, 11, 12:
				name := fmt.Sprintf("web%d", random.IntN(3))
				delete(services, namespace+"/"+name)
				a.Remove(fakekube.Services, namespace+"/"+name)
			case 13, 14:
				s.Read()
			default:
				name := fmt.Sprintf("web%d", random.IntN(3))
				services[namespace+"/"+name] = true
				a.Put(fakekube.Services, serviceOf(namespace, name))
			}
		}
		want := []string{meshObject, "Service shop/web"}
		for name := range services {
			if namespace, _, _ := strings.Cut(name, "/"); selected == "" || labels[namespace] == selected {
				want = append(want, "Service "+name)
			}
		}
		slices.Sort(want)
		s.want(want...)
		if s.removed[object.Key{Kind: object.KindService, Namespace: "shop", Name: "web"}] {
			t.Errorf("seed %d: the Service of a namespace that always counts was removed", seed)
		}
	}
}

// D13, D17: while the labels of namespaces cannot be read, the first selectors wait, and later ones
// change nothing.
func TestNamespacesForbidden(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	selectors := mesh("discoverySelectors: [{matchLabels: {mesh: enabled}}]")
	a.Put(fakekube.ConfigMaps, selectors)
	a.Put(fakekube.Namespaces, namespaceOf("shop", "mesh: enabled"))
	a.Put(fakekube.Services, serviceOf("shop", "web"))
	a.Put(fakekube.Services, serviceOf("other", "web"))
	a.Refuse(fakekube.Namespaces, http.StatusForbidden)
	s := start(t, a)
	wait.Until(t, "the reading names what is missing", func() bool {
		return strings.Contains(s.Read().Waiting, "labels of namespaces cannot be read: ")
	})
	if got := a.Lists(fakekube.Services); got > 0 {
		t.Error("Services were listed before it was known which count")
	}
	a.Refuse(fakekube.Namespaces, 0)
	s.want(meshObject, "Service shop/web")
	a.Put(fakekube.ConfigMaps, mesh("{}"))
	s.want(meshObject, "Service other/web", "Service shop/web")
	a.Refuse(fakekube.Namespaces, http.StatusForbidden)
	a.Put(fakekube.ConfigMaps, selectors)
	wait.Until(t, "the failure is known", func() bool {
		return slices.ContainsFunc(s.Status(), func(st source.Status) bool { return st.Resource == "labels of namespaces" && st.Failure != "" })
	})
	s.Read()
	if len(s.objects) != 3 {
		t.Errorf("%d objects, want 3", len(s.objects))
	}
	a.Refuse(fakekube.Namespaces, 0)
	s.want(meshObject, "Service shop/web")
}
