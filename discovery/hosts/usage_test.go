package hosts

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// inNamespace returns an object as an object of another namespace, with an exportTo if there are scopes.
func inNamespace(namespace string, o object.Object, scopes ...string) object.Object {
	o.Key.Namespace = namespace
	e, err := object.NewExportTo(scopes, namespace)
	if err != nil {
		panic(err)
	}
	if o.Entry != nil {
		o.Entry.ExportTo = e
	}
	if o.Service != nil {
		o.Service.ExportTo = e
	}
	return o
}

// wide returns a ServiceEntry whose host NAME.example.com has n addresses.
func wide(name string, n int) object.Object {
	addrs := make([]string, n)
	for i := range addrs {
		addrs[i] = fmt.Sprintf("192.0.2.%d", i)
	}
	return entry(name, name+".example.com", addrs...)
}

func defaultExportTo(scopes ...string) object.Object {
	return object.Object{
		Key:  object.Key{Kind: object.KindConfigMap, Namespace: object.DefaultRootNamespace, Name: "istio"},
		Mesh: &object.Mesh{ExportTo: scopes},
	}
}

// D64: which namespaces are hidden if 30 addresses are too many for a namespace, and what is seen of them.
func TestUsage(t *testing.T) {
	headless := inNamespace("shop", service("db", object.Service{Headless: true}))
	many := endpoints("db", strings.Split("=10.1.0."+strings.Join(strings.Split("0123456789", ""), " =10.1.0."), " ")...)
	tests := map[string]struct {
		objects, east  []object.Object
		hidden         string
		inEvil, inData string // the hosts that clients see in these namespaces
	}{
		"every host of the namespace":  {[]object.Object{inNamespace("evil", wide("w", 30)), inNamespace("evil", wide("n", 1)), inNamespace("shop", wide("s", 1))}, nil, "evil", "n s w", "s"},
		"for its own namespace":        {[]object.Object{inNamespace("evil", wide("w", 30), "."), inNamespace("evil", wide("n", 1))}, nil, "", "n w", "n"},
		"for no namespace":             {[]object.Object{inNamespace("evil", wide("w", 30), "~"), inNamespace("evil", wide("n", 1))}, nil, "", "n", "n"},
		"for one other namespace":      {[]object.Object{inNamespace("evil", wide("w", 30), "shop"), inNamespace("evil", wide("n", 1), "*")}, nil, "evil", "n", ""},
		"for itself and another":       {[]object.Object{inNamespace("evil", wide("w", 30), "shop", ".")}, nil, "evil", "w", ""},
		"the mesh shows none":          {[]object.Object{inNamespace("evil", wide("w", 30)), inNamespace("evil", wide("n", 1), "*"), defaultExportTo(".")}, nil, "", "n w", "n"},
		"the mesh shows none, a large": {[]object.Object{inNamespace("evil", wide("w", 30), "*"), inNamespace("evil", wide("n", 1)), defaultExportTo(".")}, nil, "evil", "n w", ""},
		"the mesh shows them to data":  {[]object.Object{inNamespace("evil", wide("w", 30)), defaultExportTo("data")}, nil, "evil", "", ""},
		"two clusters":                 {[]object.Object{inNamespace("evil", wide("w", 16))}, []object.Object{inNamespace("evil", wide("v", 16))}, "evil", "v w", ""},
		"a host of two namespaces":     {[]object.Object{inNamespace("evil", wide("w", 30)), inNamespace("shop", wide("w", 1))}, nil, "evil", "w", "w"},
		"aliases of another's Service": {
			[]object.Object{headless, many, inNamespace("evil", external("a", "db.shop.svc."+domain)), inNamespace("evil", external("b", "db.shop.svc."+domain)), inNamespace("evil", external("c", "db.shop.svc."+domain))},
			nil, "evil", "a.evil b.evil c.evil db.shop", "db.shop",
		},
		"an alias of a hidden host": {
			[]object.Object{inNamespace("evil", wide("w", 15)), inNamespace("evil", wide("n", 15)), inNamespace("shop", external("a", "w.example.com")), inNamespace("shop", clusterIP("web", "10.0.0.1"))},
			nil, "evil", "a.shop n w web.shop", "web.shop",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := New(domain, 1, NewVIPs())
			h.usage.limit = 400
			u := h.Update(in("", test.objects...), in("east", test.east...))
			var hidden []string
			for _, one := range u.Hidden {
				hidden = append(hidden, one.Namespace)
			}
			if got := strings.Join(hidden, " "); got != test.hidden {
				t.Errorf("hidden namespaces: %q, want %q", got, test.hidden)
			}
			for namespace, want := range map[string]string{"evil": test.inEvil, "data": test.inData} {
				var names []string
				for key := range seen(t, h, View{Namespace: namespace, Families: Families{V4: true}}) {
					names = append(names, strings.TrimSuffix(strings.TrimSuffix(key, ".example.com"), ".svc."+domain))
				}
				slices.Sort(names)
				if got := strings.Join(names, " "); got != want {
					t.Errorf("%s sees %q, want %q", namespace, got, want)
				}
			}
		})
	}
}

// D64: a namespace is hidden exactly while it is beyond the limit. Its hosts keep their VIPs, and the other claims to its
// hosts stay.
func TestUsageOfUpdates(t *testing.T) {
	h := New(domain, 1, NewVIPs())
	h.usage.limit = 400
	see := func(namespace string) string {
		return fmt.Sprint(seen(t, h, View{Namespace: namespace, Families: Families{V4: true}, VIPs: true}))
	}
	h.Update(in("", inNamespace("evil", entry("vip", "vip.example.com")), inNamespace("evil", wide("w", 1)), inNamespace("shop", entry("w", "w.example.com", "198.51.100.1"))))
	first := see("data")
	for range 3 {
		u := h.Update(in("", inNamespace("evil", wide("more", 30))))
		if got := see("data"); len(u.Hidden) != 1 || len(u.Hosts) != 3 || strings.Contains(got, "192.0.2.0") || strings.Contains(got, "vip") || !strings.Contains(got, "198.51.100.1") {
			t.Errorf("%d hosts have changed, hidden are %v, and others see %s", len(u.Hosts), u.Hidden, got)
		}
		if got := see("evil"); !strings.Contains(got, "240.240.") || !strings.Contains(got, "192.0.2.0") || h.Counts().VIPs != 1 {
			t.Errorf("the hidden namespace sees %s", got)
		}
		again := h.Update(in("", inNamespace("shop", wide("s", 1))))
		if len(again.Hosts) > 1 || &again.Hidden[0] != &u.Hidden[0] {
			t.Errorf("a change of another namespace changes %d hosts, and hides %v", len(again.Hosts), again.Hidden)
		}
		h.Update(Change{Removed: []object.Key{inNamespace("shop", wide("s", 1)).Key}})
		if u = h.Update(Change{Removed: []object.Key{inNamespace("evil", wide("more", 30)).Key}}); len(u.Hidden) != 0 || see("data") != first {
			t.Errorf("hidden are %v, and others see %s, want %s", u.Hidden, see("data"), first)
		}
	}
}

// D64: Services count about as much as they have in tables; 100,000 of one namespace are within the limit.
func TestUsageOfServices(t *testing.T) {
	const n = 20_000
	h := New(domain, 1, NewVIPs())
	objects := make([]object.Object, n)
	for i := range objects {
		objects[i] = service(fmt.Sprintf("service-%d", i), object.Service{
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}, Ports: ports("http=80"),
		})
	}
	h.Update(Change{Updated: objects})
	viewer, encoded := h.Viewer(View{Namespace: "data", Families: Families{V4: true}}), 0
	for host := range h.All() {
		encoded += len(viewer.Entry(host).Encoded)
	}
	if got := h.usage.namespaces["shop"].size; got < encoded*8/10 || got > encoded*12/10 || got > MaxShown*n/100_000 {
		t.Errorf("%d hosts count %d KiB, and have %d KiB in a table", n, got>>10, encoded>>10)
	}
}
