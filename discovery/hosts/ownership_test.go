package hosts

import (
	"flag"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

var rounds = flag.Int("ownership.rounds", 400, "random meshes of TestOwnership")

// shows reports whether clients in a namespace may see something of an object, and may see it of a host.
func shows(namespace string, o object.Object, host string) bool {
	switch {
	case o.Sidecar != nil:
		return o.Key.Namespace == namespace || o.Key.Namespace == object.DefaultRootNamespace
	case o.Service != nil:
		return o.Service.ExportTo.VisibleIn(namespace) && (host == "" || host == o.Key.Name+"."+o.Key.Namespace+".svc."+domain)
	}
	return o.Entry.ExportTo.VisibleIn(namespace) && slices.ContainsFunc(o.Entry.Hosts, func(h string) bool {
		named, belongs := map[string]string{ // hosts that belong to Services
			"web.bank.svc": "bank", "web.bank.svc.cluster.local": "bank", "x.web.bank.svc.cluster.local": "bank", "*.bank.svc.cluster.local": "bank",
			"db.shop.svc.cluster.local": "shop", "*.svc": "-", "*.svc.cluster.local": "-", "*.cluster.local": "-", "svc.cluster.local": "-", "web": namespace,
		}[h]
		return (strings.EqualFold(h, host) || host == "") && (!belongs || named == o.Key.Namespace || o.Key.Namespace == object.DefaultRootNamespace)
	})
}

// changed returns the hosts whose entries differ, except for aliases of the host of a Service that has changed, aliases
// of hosts whose entries differ, and aliases of these.
func changed(service string, before, after map[string]string) (all []string) {
	hosts := maps.Clone(before)
	maps.Copy(hosts, after)
	maps.DeleteFunc(hosts, func(host, _ string) bool { return before[host] == after[host] })
	alias := func(text string) string {
		_, name, _ := strings.Cut(strings.ToLower(text), "alias:")
		return name
	}
	for host := range hosts {
		old, current := alias(before[host]), alias(after[host])
		follows := func(other string) bool {
			name := strings.TrimPrefix(other, "*") + `"`
			same := old != "" && old == alias(before[other]) && current == alias(after[other])
			return other != host && (same || strings.Contains(old, name) || strings.Contains(current, name))
		}
		if !slices.ContainsFunc(append(sortedKeys(hosts), service), follows) {
			all = append(all, host)
		}
	}
	return all
}

// D65, D68: an object that clients may not see changes nothing in their table. An object of one namespace changes no
// host of clients in another one that their own namespace, or a Service, has. What a Service has is its own.
func TestOwnership(t *testing.T) {
	for seed := range uint64(*rounds) {
		w := world{rand.New(rand.NewPCG(seed, 1)), false}
		next := func() object.Object {
			for {
				if o := w.object(); o.Entry != nil || o.Service != nil || o.Sidecar != nil {
					return o
				}
			}
		}
		h, objects := New(domain, 1), map[object.Key]object.Object{}
		for range 8 + w.IntN(12) {
			o := next()
			objects[o.Key] = o
		}
		h.Update(Change{Updated: slices.Collect(maps.Values(objects))})
		see := func(h *Hosts, namespace string) map[string]string {
			return seen(t, h, View{Namespace: namespace, Families: Families{V4: true}, VIPs: true, Sidecar: h.Sidecar(namespace, nil)})
		}
		before := map[string]map[string]string{}
		for _, namespace := range tenants {
			before[namespace] = see(h, namespace)
		}
		o, change := next(), Change{}
		old, key := objects[o.Key], o.Key
		if objects[o.Key] = o; w.IntN(3) > 0 {
			change.Updated = []object.Object{o}
		} else {
			delete(objects, o.Key)
			change.Removed = []object.Key{o.Key}
			o = object.Object{}
		}
		h.Update(change)
		for _, namespace := range tenants {
			after := see(h, namespace)
			may := func(o object.Object, host string) bool { return o != object.Object{} && shows(namespace, o, host) }
			if diff := cmp.Diff(before[namespace], after); diff != "" && !may(o, "") && !may(old, "") {
				t.Fatalf("seed %d: %v, which was %v, changes the table of %s, which may not see it:\n%s", seed, o, old, namespace, diff)
			}
			limited := h.Sidecar(namespace, nil) != Limit{} // and so may not show the own one, or the Service
			for key, o := range objects {
				host := key.Name + "." + key.Namespace + ".svc." + domain
				if o.Service != nil && may(o, host) && !limited && key.Namespace != object.DefaultRootNamespace && namespace != object.DefaultRootNamespace &&
					strings.Contains(after[host], `"`+object.DefaultRootNamespace+`"`) {
					t.Fatalf("seed %d: %s has %s of the root namespace, although there is the Service %v", seed, host, after[host], o)
				}
			}
			if key.Kind == object.KindSidecar || key.Namespace == namespace {
				continue
			}
			for _, host := range changed(key.Name+"."+key.Namespace+".svc."+domain, before[namespace], after) {
				own := func(other object.Object) bool {
					return other.Key.Namespace == namespace && other.Entry != nil && slices.Contains(other.Entry.Hosts, host) && len(other.Entry.Addrs) > 0 && shows(namespace, other, host)
				}
				if !may(o, host) && !may(old, host) || !limited && strings.Contains(after[host], registryExternal) && slices.ContainsFunc(slices.Collect(maps.Values(objects)), own) {
					t.Fatalf("seed %d: %v, which was %v, changes %s for %s:\n%s", seed, o, old, host, namespace, before[namespace][host]+"\n"+after[host])
				}
			}
		}
	}
}
