package hosts

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

var rounds = flag.Int("ownership.rounds", 400, "random meshes of TestOwnership")

// tenants are five namespaces, of which one is the root namespace.
var tenants = []string{"bank", "shop", "evil", "data", object.DefaultRootNamespace}

// A mesh has random objects of five namespaces that claim few names.
type mesh5 struct {
	world
	objects map[object.Key]object.Object
}

func (m mesh5) name() string {
	return m.pick("a.example.com", "b.example.com", "*.example.com", "*.local", "*.svc", "web", "web.bank", "web.bank.svc", "web.bank.svc.cluster.local",
		"db.shop.svc.cluster.local", "x.web.bank.svc.cluster.local", "*.bank.svc.cluster.local", "*.svc.cluster.local", "*.cluster.local", "svc.cluster.local")
}

func (m mesh5) scopes(namespace string) object.ExportTo {
	scopes := []string{"*", ".", "~", m.pick(tenants...), m.pick(tenants...)}
	e, _ := object.NewExportTo(scopes[m.IntN(len(scopes)):][:m.IntN(2)], namespace)
	return e
}

func (m mesh5) object() object.Object {
	o := object.Object{Key: object.Key{Namespace: m.pick(tenants...), Name: m.pick("web", "db")}}
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(m.IntN(250))}), slotAddr4(preferredSlot(m.pick("a.example.com", "b.example.com")))}[:m.IntN(3)]
	switch m.IntN(6) {
	case 0, 1:
		o.Key.Kind = object.KindService
		o.Service = &object.Service{ExportTo: m.scopes(o.Key.Namespace), ClusterIPs: addrs, Headless: len(addrs) == 0, Numbers: []uint16{80}}
		if m.IntN(3) == 0 {
			o.Service = &object.Service{ExportTo: o.Service.ExportTo, ExternalName: m.pick("a.example.com", "b.example.com", strings.TrimPrefix(m.name(), "*."))}
		}
	case 2, 3, 4:
		o.Key.Kind = object.KindServiceEntry
		o.Entry = &object.ServiceEntry{Hosts: []string{m.name(), m.name()}, Addrs: addrs, HasAddresses: len(addrs) > 0, Resolution: "DNS",
			ExportTo: m.scopes(o.Key.Namespace)}
		o.Entry.Created = o.Entry.Created.AddDate(m.IntN(2), 0, 0)
	case 5:
		o.Key.Kind = object.KindSidecar
		host := func() object.EgressHost {
			return object.EgressHost{Namespace: m.pick("*", ".", "bank", "evil"), Host: m.pick("*", "*.example.com", "web.bank.svc.cluster.local"), Excluded: m.IntN(3) == 0}
		}
		o.Sidecar = &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{host(), host()}}, {Port: 80, Hosts: []object.EgressHost{host()}}}}
	}
	return o
}

// shows reports whether clients in a namespace may see something of an object, and may see it of a host.
func (m mesh5) shows(namespace string, o object.Object, host string) bool {
	switch {
	case o.Sidecar != nil:
		return o.Key.Namespace == namespace || o.Key.Namespace == object.DefaultRootNamespace
	case o.Service != nil:
		return o.Service.ExportTo.VisibleIn(namespace) && (host == "" || host == o.Key.Name+"."+o.Key.Namespace+".svc."+domain)
	}
	return o.Entry.ExportTo.VisibleIn(namespace) && slices.ContainsFunc(o.Entry.Hosts, func(h string) bool {
		named, belongs := map[string]string{
			"web.bank.svc": "bank", "web.bank.svc.cluster.local": "bank", "x.web.bank.svc.cluster.local": "bank", "*.bank.svc.cluster.local": "bank",
			"db.shop.svc.cluster.local": "shop", "*.svc": "-", "*.svc.cluster.local": "-", "*.cluster.local": "-", "svc.cluster.local": "-", "web": namespace,
		}[h]
		return (h == host || host == "") && (!belongs || named == o.Key.Namespace || o.Key.Namespace == object.DefaultRootNamespace)
	})
}

// tableOf returns the table of clients in a namespace.
func tableIn(h *Hosts, namespace string) map[string]*api.NameTable_NameInfo {
	viewer := h.Viewer(View{Namespace: namespace, Families: Families{V4: true}, VIPs: true, Sidecar: h.Sidecar(namespace, nil)})
	all := map[string]*api.NameTable_NameInfo{}
	for host := range h.All() {
		if e := viewer.Entry(host); e != nil {
			var table api.NameTable
			if err := proto.Unmarshal(e.Encoded, &table); err != nil {
				panic(err)
			}
			all[host.Key] = table.GetTable()[e.Host]
		}
	}
	return all
}

// changed returns the hosts whose entries differ, except for aliases of hosts whose entries differ.
func changed(before, after map[string]*api.NameTable_NameInfo) (all []string) {
	hosts := maps.Clone(before)
	maps.Copy(hosts, after)
	maps.DeleteFunc(hosts, func(host string, _ *api.NameTable_NameInfo) bool { return proto.Equal(before[host], after[host]) })
	follows := func(alias string) bool {
		for host := range hosts {
			if suffix, wild := strings.CutPrefix(host, "*"); host == alias || wild && strings.HasSuffix(alias, suffix) {
				return true
			}
		}
		return false
	}
	for host := range hosts {
		if !follows(after[host].GetAlias()) && !follows(before[host].GetAlias()) {
			all = append(all, host)
		}
	}
	return all
}

// D65, D68: an object that clients may not see changes nothing in their table. An object of one namespace changes no
// host of clients in another one that their own namespace, or a Service, has. Updates lead to what a build makes.
func TestOwnership(t *testing.T) {
	for seed := range uint64(*rounds) {
		m := mesh5{world{rand.New(rand.NewPCG(seed, 1)), false}, map[object.Key]object.Object{}}
		h := New(domain, 1, NewVIPs())
		for range 6 + m.IntN(8) {
			o := m.object()
			m.objects[o.Key] = o
		}
		h.Update(Change{Updated: slices.Collect(maps.Values(m.objects))})
		before := map[string]map[string]*api.NameTable_NameInfo{}
		for _, namespace := range tenants {
			before[namespace] = tableIn(h, namespace)
		}
		o, change := m.object(), Change{}
		old, key := m.objects[o.Key], o.Key
		if m.objects[o.Key] = o; m.IntN(3) > 0 {
			change.Updated = []object.Object{o}
		} else {
			delete(m.objects, o.Key)
			change.Removed = []object.Key{o.Key}
			o = object.Object{}
		}
		h.Update(change)
		fresh := New(domain, 1, h.vips)
		fresh.settled = true
		fresh.Update(Change{Updated: slices.Collect(maps.Values(m.objects))})
		for _, namespace := range tenants {
			after := tableIn(h, namespace)
			if diff := cmp.Diff(tableIn(fresh, namespace), after, cmp.Comparer(proto.Equal)); diff != "" {
				t.Fatalf("seed %d: %s: -anew +updated\n%s", seed, namespace, diff)
			}
			may := func(o object.Object, host string) bool { return o != object.Object{} && m.shows(namespace, o, host) }
			if diff := cmp.Diff(before[namespace], after, cmp.Comparer(proto.Equal)); diff != "" && !may(o, "") && !may(old, "") {
				t.Fatalf("seed %d: %v, which was %v, changes the table of %s, which may not see it:\n%s", seed, o, old, namespace, diff)
			}
			if key.Kind == object.KindSidecar || key.Namespace == namespace {
				continue
			}
			for _, host := range changed(before[namespace], after) {
				own := func(other object.Object) bool {
					return other.Key.Namespace == namespace && other.Entry != nil && slices.Contains(other.Entry.Hosts, host) && len(other.Entry.Addrs) > 0 && m.shows(namespace, other, host)
				}
				limited := h.Sidecar(namespace, nil) != Limit{} // and so may not show the own one
				if !may(o, host) && !may(old, host) || !limited && after[host].GetRegistry() == registryExternal && slices.ContainsFunc(slices.Collect(maps.Values(m.objects)), own) {
					t.Fatalf("seed %d: %v, which was %v, changes %s for %s:\n%s", seed, o, old, host, namespace, fmt.Sprint(before[namespace][host], after[host]))
				}
			}
		}
	}
}
