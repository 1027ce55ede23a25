package hosts

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// D9: an alias has at most 64 addresses of its target. Its entries need memory once for each view, however many claims
// the target has.
func TestAliasOfManyClaims(t *testing.T) {
	h := New(domain, 1, NewVIPs())
	objects := []object.Object{external("alias", "many.example.com")}
	for i := range maxLent + 1 {
		objects = append(objects, entry(fmt.Sprintf("e%d", i), "many.example.com", fmt.Sprintf("192.0.2.%d", i)))
	}
	h.Update(Change{Updated: objects})
	viewer := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}})
	host := h.host("alias.shop.svc." + domain)
	for range 10 {
		if e := viewer.Entry(host); e == nil || strings.Count(string(e.Encoded), "192.0.2.") != maxLent {
			t.Fatalf("the alias has the entry %v", e)
		}
	}
	if len(*host.variants.Load()) != 1 {
		t.Errorf("the host keeps %d entries of one view, want 1", len(*host.variants.Load()))
	}
}

// D9: all aliases of a row follow their target. Those at the end of a row of more than 16 are left out.
func TestRowOfAliases(t *testing.T) {
	h := New(domain, 1, NewVIPs())
	h.Update(Change{Updated: row(maxAliases + 3)})
	u := h.Update(Change{Updated: []object.Object{clusterIP("s0", "10.0.0.2")}})
	if len(u.Hosts) != maxAliases+3 || len(u.Problems) != 2 {
		t.Fatalf("%d hosts have changed, and these are left out: %v", len(u.Hosts), u.Problems)
	}
	got := ips(t, h)
	if _, listed := got["s17"]; listed || got["s16"] != "10.0.0.2" {
		t.Errorf("the last aliases have the addresses %v", got)
	}
}

// row returns a Service, and aliases of which each stands for the one before.
func row(n int) []object.Object {
	objects := []object.Object{clusterIP("s0", "10.0.0.1")}
	for i := range n - 1 {
		objects = append(objects, external(fmt.Sprint("s", i+1), fmt.Sprintf("s%d.shop.svc.%s", i, domain)))
	}
	return objects
}

// D31: clients that see the same of a host share its entry, however many claims the host has. Others have another one.
func TestEntryOfManyClaims(t *testing.T) {
	h := New(domain, 1, NewVIPs())
	var objects []object.Object
	for i := range 200 {
		e := entry(fmt.Sprintf("e%d", i), "many.example.com", fmt.Sprintf("192.0.2.%d", i))
		if i == 100 {
			e.Entry.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"shop"}}
		}
		objects = append(objects, e)
	}
	h.Update(Change{Updated: objects})
	entryIn := func(namespace string) *Entry {
		viewer := h.Viewer(View{Namespace: namespace, Families: Families{V4: true}})
		return viewer.Entry(h.host("many.example.com"))
	}
	if entryIn("data") != entryIn("bank") {
		t.Error("two namespaces that see the same do not share the entry")
	}
	const hidden = "192.0.2.100"
	if !strings.Contains(string(entryIn("shop").Encoded), hidden) || strings.Contains(string(entryIn("data").Encoded), hidden) {
		t.Errorf("shop is sent %q, and data %q", entryIn("shop").Encoded, entryIn("data").Encoded)
	}
}

// D65: a ServiceEntry of another namespace takes over no Service, even if that has no address or is
// an alias.
func TestServiceIsNotTakenOver(t *testing.T) {
	host := func(name string) string { return name + ".shop.svc." + domain }
	services := []object.Object{
		clusterIP("web", "10.0.0.1"), service("empty", object.Service{Headless: true}), external("inside", host("web")), external("outside", "db.example.org"),
	}
	see := func(namespace string) map[string]string {
		h := New(domain, 1, NewVIPs())
		h.Update(Change{Updated: services})
		if namespace != "" {
			var entries []object.Object
			for i, name := range []string{"web", "empty", "inside", "Outside"} {
				e := entry(fmt.Sprint("e", i), host(name), "203.0.113.66")
				e.Key.Namespace = namespace
				entries = append(entries, e)
			}
			h.Update(Change{Updated: entries})
		}
		return seen(t, h, View{Namespace: "shop", Families: Families{V4: true}})
	}
	if got, want := see("other"), see(""); !maps.Equal(got, want) || !strings.Contains(got[host("outside")], `alias:"db.example.org"`) {
		t.Errorf("with the ServiceEntries of another namespace: %v, want %v", got, want)
	}
	if own := see("shop"); !strings.Contains(own[host("empty")], "203.0.113.66") {
		t.Errorf("with the hosts of its own namespace: %v", own)
	}
}
