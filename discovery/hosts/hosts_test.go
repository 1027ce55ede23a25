package hosts

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/object"
)

const domain = "cluster.local"

func key(kind, name string) object.Key {
	return object.Key{Kind: kind, Namespace: "shop", Name: name}
}

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

func service(name string, s object.Service) object.Object {
	return object.Object{Key: key(object.KindService, name), Service: &s}
}

func clusterIP(name, ip string) object.Object {
	return service(name, object.Service{ClusterIPs: []netip.Addr{addr(ip)}})
}

func external(name, target string) object.Object {
	return service(name, object.Service{ExternalName: target})
}

func entry(name, host string, ips ...string) object.Object {
	e := &object.ServiceEntry{Hosts: []string{host}, Resolution: "DNS", HasAddresses: len(ips) > 0}
	for _, ip := range ips {
		e.Addrs = append(e.Addrs, addr(ip))
	}
	return object.Object{Key: key(object.KindServiceEntry, name), Entry: e}
}

// seen returns the hosts that a view shows, and their addresses.
func seen(t *testing.T, h *Hosts, v View) map[string]string {
	t.Helper()
	out := map[string]string{}
	for k, e := range newEntryCheck(t).shown(h, h.Viewer(v)) {
		var table api.NameTable
		if err := proto.Unmarshal(e.Encoded, &table); err != nil {
			t.Fatal(err)
		}
		out[k] = fmt.Sprint(e.Host, " ", table.GetTable()[e.Host])
	}
	return out
}

// An entryCheck checks each entry once, however many views show it.
type entryCheck struct {
	t    *testing.T
	good map[string]bool // the encoded entries that were checked
}

func newEntryCheck(t *testing.T) entryCheck {
	t.Helper()
	return entryCheck{t, map[string]bool{}}
}

// shown returns the entries that a viewer of h shows, by the key of their host.
func (c entryCheck) shown(h *Hosts, viewer Viewer) map[string]*Entry {
	c.t.Helper()
	out := map[string]*Entry{}
	for host := range h.All() {
		k := host.Key
		e := viewer.Entry(host)
		if e == nil {
			continue
		}
		if !strings.EqualFold(k, e.Host) {
			c.t.Errorf("%s has an entry of %s", k, e.Host)
		}
		c.check(e)
		out[k] = e
	}
	return out
}

// check checks that an entry has one host, which is a Service or has an address.
func (c entryCheck) check(e *Entry) {
	c.t.Helper()
	id := e.Host + "\n" + string(e.Encoded)
	if c.good[id] {
		return
	}
	c.good[id] = true
	var table api.NameTable
	if err := proto.Unmarshal(e.Encoded, &table); err != nil {
		c.t.Fatal(err)
	}
	if len(table.GetTable()) != 1 || len(table.GetTable()[e.Host].GetIps()) == 0 && table.GetTable()[e.Host].GetRegistry() != "Kubernetes" {
		c.t.Errorf("the entry of %s is %v", e.Host, &table)
	}
}

func sameEntry(a, b *Entry) bool {
	return a.Host == b.Host && bytes.Equal(a.Encoded, b.Encoded)
}

// ips returns the addresses of the hosts that a client in namespace shop sees, without the domain
// of Services.
func ips(t *testing.T, h *Hosts) map[string]string {
	t.Helper()
	viewer, out := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}}), map[string]string{}
	for host := range h.All() {
		k := host.Key
		if e := viewer.Entry(host); e != nil {
			_, addrs := e.addrs()
			out[strings.TrimSuffix(k, ".shop.svc."+domain)] = strings.Trim(fmt.Sprint(addrs), "[]")
		}
	}
	return out
}

// D9: an alias has the addresses of the mesh host that it stands for, also by way of other aliases
// and wildcards, and follows their changes. An alias of itself, and one of another host, is left out.
func TestAliases(t *testing.T) {
	h := New(domain, 1)
	update := func(objects ...object.Object) Update { return h.Update(Change{Updated: objects}) }
	want := func(loops string, want map[string]string) {
		t.Helper()
		if diff := cmp.Diff(want, ips(t, h)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
		if got := strings.Join(sortedKeys(h.problems.byKey), " "); got != loops {
			t.Errorf("loops %s, want %s", got, loops)
		}
	}
	host := func(name string) string { return name + ".shop.svc." + domain }
	update(external("a", host("b")), external("b", "WEB.shop.svc."+domain), external("w", "x.wild.example.com"), external("out", "www.example.com"))
	want("", map[string]string{"a": "", "b": "", "w": "", "out": ""})
	u := update(clusterIP("web", "10.0.0.1"), entry("wild", "*.wild.example.com", "192.0.2.1"))
	want("", map[string]string{"web": "10.0.0.1", "a": "10.0.0.1", "b": "10.0.0.1", "w": "192.0.2.1", "out": "", "*.wild.example.com": "192.0.2.1"})
	if len(u.Hosts) != 5 {
		t.Errorf("%d hosts have changed, want 5", len(u.Hosts))
	}
	if got := seen(t, h, View{Namespace: "shop", Families: Families{V4: true}})[host("a")]; !strings.Contains(got, `alias:"WEB.shop.svc.cluster.local"`) {
		t.Errorf("the alias has the entry %s", got)
	}
	update(clusterIP("web", "10.0.0.2"), entry("exact", "x.wild.example.com", "192.0.2.2"))
	want("", map[string]string{"web": "10.0.0.2", "a": "10.0.0.2", "b": "10.0.0.2", "w": "192.0.2.2", "out": "", "*.wild.example.com": "192.0.2.1", "x.wild.example.com": "192.0.2.2"})
	update(external("web", host("a")))
	want(host("a")+" "+host("b")+" "+host("web"), map[string]string{"w": "192.0.2.2", "out": "", "*.wild.example.com": "192.0.2.1", "x.wild.example.com": "192.0.2.2"})
	h.Update(Change{Removed: []object.Key{key(object.KindService, "web"), key(object.KindServiceEntry, "exact")}})
	want("", map[string]string{"a": "", "b": "", "w": "192.0.2.1", "out": "", "*.wild.example.com": "192.0.2.1"})
	if got := h.Counts().Hosts; got != 5 {
		t.Errorf("%d hosts are in tables, want 5", got)
	}
}

// world makes random objects of few names, so that they meet.
type world struct {
	*rand.Rand
	clusters bool // there are several
}

func (w world) pick(of ...string) string { return of[w.IntN(len(of))] }

func (w world) addr() netip.Addr {
	return addr(w.pick("10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "240.240.0.9", automaticVIPs("", "a.example.com")[0].String()))
}

func (w world) exportTo() object.ExportTo {
	switch w.IntN(6) {
	case 0, 1:
		return object.ExportTo{}
	case 2:
		return object.ExportTo{Public: true}
	case 3:
		return object.ExportTo{Restricted: true}
	}
	e := object.ExportTo{Restricted: true, Namespaces: []string{w.pick(tenants...)}}
	for i := range w.IntN(2) * maxIndexed { // a list with more is looked through
		e.Namespaces = append(e.Namespaces, fmt.Sprintf("team%02d", i))
	}
	return e
}

func (w world) ports() object.Ports {
	return ports([]string{"http=80", "sql=5432"}[:w.IntN(3)]...)
}

// tenants are five namespaces, of which one is the root namespace.
var tenants = []string{"bank", "shop", "evil", "data", object.DefaultRootNamespace}

func (w world) host() string {
	return w.pick("a.example.com", "A.example.com", "b.example.com", "*.example.com", "*.local", "*.svc", "web", "web.bank", "web.bank.svc",
		"web.bank.svc.cluster.local", "db.shop.svc.cluster.local", "x.web.bank.svc.cluster.local", "*.bank.svc.cluster.local", "*.cluster.local", "svc.cluster.local")
}

func (w world) object() object.Object {
	o := object.Object{Key: object.Key{Namespace: w.pick(tenants...), Name: w.pick("web", "db")}}
	switch w.IntN(10) {
	case 0, 1:
		o.Key.Kind = object.KindService
		o.Service = &object.Service{ExportTo: w.exportTo(), PublishNotReady: w.IntN(2) == 0, ClusterOnly: w.IntN(3) == 0, Ports: w.ports(), Numbers: []uint16{80}}
		switch w.IntN(3) {
		case 0:
			o.Service.Headless = true
			o.Service.Selector = map[string]string{"app": w.pick("web", "db")}
		case 1:
			o.Service.ClusterIPs = []netip.Addr{w.addr()}
		case 2:
			o.Service.ExternalName = w.pick("a.example.com", "b.example.com", strings.TrimPrefix(w.host(), "*."))
		}
	case 2:
		o.Key.Kind = object.KindEndpointSlice
		o.Slice = &object.EndpointSlice{Service: w.pick("", "web", "db"), Ports: w.ports(), Endpoints: []object.Endpoint{
			{Addrs: []netip.Addr{w.addr()}, Ready: w.IntN(2) == 0, Hostname: w.pick("", "web-0")},
			{Addrs: []netip.Addr{w.addr()}, Ready: true, Pod: w.pick("web", "db")},
		}}
		if w.IntN(2) == 0 {
			o.Slice.Import, o.Slice.Cluster = w.pick("web", "db"), w.pick("", "c1", "c2")
		}
	case 3:
		o.Key.Kind = object.KindPod
		o.Pod = &object.Pod{Labels: map[string]string{"app": w.pick("web", "db")}, Hostname: w.pick("", "p"), Subdomain: w.pick("web", "db"),
			Addrs: []netip.Addr{w.addr()}, Ready: w.IntN(2) == 0, Terminated: w.IntN(5) == 0}
	case 4:
		o.Key.Kind = object.KindServiceEntry
		o.Entry = &object.ServiceEntry{Hosts: []string{w.host(), w.host()}, Resolution: w.pick("DNS", "NONE", "DYNAMIC_DNS"), ExportTo: w.exportTo(),
			Created: time.Unix(int64(w.IntN(2)), 0)}
		if w.IntN(2) == 0 {
			o.Entry.Addrs, o.Entry.HasAddresses = []netip.Addr{w.addr()}, true
		} else if w.IntN(3) == 0 {
			o.Entry.VIPs = map[string][]netip.Addr{o.Entry.Hosts[0]: {w.addr()}}
		}
	case 5:
		o.Key.Kind = object.KindSidecar
		host := func() object.EgressHost {
			return object.EgressHost{Namespace: w.pick("*", ".", "bank", "data"), Host: w.pick("*", "*.example.com", "web.bank.svc.cluster.local"), Excluded: w.IntN(3) == 0}
		}
		o.Sidecar = &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{host(), host()}}, {Port: 80, Hosts: []object.EgressHost{host()}}}}
		if w.IntN(2) == 0 {
			o.Sidecar.Labels = map[string]string{"app": w.pick("web", "db")}
		}
	case 6:
		o.Key = object.Key{Kind: object.KindNamespace, Name: object.DefaultRootNamespace}
		o.Namespace = &object.Namespace{Network: w.pick("", "net1", "net2")}
	case 7:
		o.Key = object.Key{Kind: object.KindConfigMap, Namespace: object.DefaultRootNamespace, Name: "istio"}
		o.Mesh = &object.Mesh{RootNamespace: w.pick("", "data"), ExportTo: []string{w.pick("*", ".", "~", "shop")}}
	case 8:
		o.Key.Kind = object.KindServiceImport
		o.Import = &object.ServiceImport{Headless: w.IntN(2) == 0, IPs: []netip.Addr{w.addr()}, Ports: w.ports()}
	case 9:
		o.Key = object.Key{Kind: object.KindCluster, Name: "kube-system"}
		o.Cluster = &object.Cluster{UID: w.pick("one", "two")}
	}
	return o
}

// A part is a source of objects of a cluster.
type part struct {
	cluster string
	source  int
}

// objects holds the objects of all sources.
type objects map[part]map[object.Key]object.Object

// change makes a random change. Now and then it removes a whole cluster.
func (w world) change(all objects) Change {
	at := part{"", w.IntN(2)}
	if at.cluster = w.pick("", "", "east", "west"); !w.clusters {
		at.cluster = ""
	}
	if at.cluster != "" {
		at.source = 0
		if w.IntN(20) == 0 {
			delete(all, at)
			return Change{Cluster: at.cluster, Dropped: true}
		}
	}
	if all[at] == nil {
		all[at] = map[object.Key]object.Object{}
	}
	o, c := w.object(), Change{Cluster: at.cluster, Source: at.source}
	switch w.IntN(20) {
	case 0:
		c.Updated, c.Removed = []object.Object{o}, slices.DeleteFunc(slices.Collect(maps.Keys(all[at])), func(key object.Key) bool { return key == o.Key })
		all[at] = map[object.Key]object.Object{o.Key: o}
	case 1, 2, 3, 4, 5, 6:
		delete(all[at], o.Key)
		c.Removed = []object.Key{o.Key}
	default:
		all[at][o.Key] = o
		c.Updated = []object.Object{o}
	}
	return c
}

// build returns the changes that make hosts have all objects.
func (all objects) build() []Change {
	var changes []Change
	for at, objects := range all {
		list := slices.Collect(maps.Values(objects))
		changes = append(changes, Change{Cluster: at.cluster, Source: at.source, Updated: list})
	}
	return changes
}

// TestUpdatesEqualBuild makes thousands of random changes, and compares the result with a build
// from all objects, for clients of all kinds. The reported changes must lead from the old entries
// to the new ones. Namespaces are often beyond the limit of usage.
func TestUpdatesEqualBuild(t *testing.T) {
	entries := newEntryCheck(t)
	passed, hidden, how := 0, "", map[Hidden]int{}
	for seed := range uint64(8) {
		w := world{rand.New(rand.NewPCG(seed, 0)), seed%2 == 1}
		h := New(domain, 2)
		if h.usage.maxShown, h.usage.maxOwn = 300+600*int(seed/2), 200+200*int(seed/2); seed%4 == 3 {
			h.usage.maxShown, h.usage.maxOwn = MaxShown, MaxOwn
		}
		all := objects{}
		before := shadow{}
		shards, special := new(Shards), NewSpecial()
		for step := range 100 {
			var changes []Change
			for range 1 + w.IntN(3) {
				changes = append(changes, w.change(all))
			}
			u := h.Update(changes...)
			fresh := New(domain, 2)
			fresh.usage.maxShown, fresh.usage.maxOwn = h.usage.maxShown, h.usage.maxOwn
			fresh.Update(all.build()...)
			if diff := cmp.Diff(fresh.usage, h.usage, cmp.AllowUnexported(usage{}, taken{}), cmpopts.IgnoreFields(usage{}, "hidden", "ordered"), cmpopts.IgnoreFields(Hidden{}, "Size")); diff != "" {
				t.Fatalf("seed %d, step %d: usage -anew +updated\n%s", seed, step, diff)
			}
			counted := 0
			for _, t := range h.usage.namespaces {
				counted += t.shown + t.own
			}
			for _, host := range h.hosts {
				for _, c := range host.claims {
					others := func(other *claim) bool { return other != c && other.namespace == c.namespace }
					counted -= host.size(c, slices.ContainsFunc(host.claims, others))
				}
			}
			if counted != 0 {
				t.Fatalf("seed %d, step %d: namespaces count %d bytes more than their hosts", seed, step, counted)
			}
			if now := fmt.Sprint(sortedKeys(h.usage.hidden.byKey)); now != hidden {
				hidden = now
				passed++
			}
			for _, one := range u.Hidden {
				how[Hidden{Shown: one.Shown, Own: one.Own}]++
			}
			if diff := cmp.Diff(fresh.Counts(), h.Counts()); diff != "" {
				t.Fatalf("seed %d, step %d: counts -anew +updated\n%s", seed, step, diff)
			}
			shards = shards.After(u.Hosts)
			if n := count(shards); n != len(h.hosts) {
				t.Fatalf("seed %d, step %d: the shards have %d hosts, want %d", seed, step, n, len(h.hosts))
			}
			special.Follow(u.Hosts)
			if diff := cmp.Diff(specialOf(h), special, cmp.AllowUnexported(Special{})); diff != "" {
				t.Fatalf("seed %d, step %d: special hosts -anew +updated\n%s", seed, step, diff)
			}
			for _, view := range views(h) {
				viewer := h.Viewer(view)
				shown := entries.shown(h, viewer)
				if !maps.EqualFunc(entries.shown(fresh, fresh.Viewer(view)), shown, sameEntry) {
					t.Fatalf("seed %d, step %d, %+v: -anew +updated\n%s", seed, step, view, cmp.Diff(seen(t, fresh, view), seen(t, h, view)))
				}
				size := 0
				for key, e := range shown {
					size += len(e.Encoded)
					counted, claims := 0, h.hosts[key].claims
					for _, c := range claims {
						counted += h.hosts[key].size(c, len(claims) > 1)
					}
					if counted < len(e.Encoded) {
						t.Errorf("seed %d, step %d, %+v: %s has %d bytes, and counts as %d %q", seed, step, view, key, len(e.Encoded), counted, e.Encoded)
					}
				}
				if most := h.usage.maxShown + h.usage.maxOwn; size > most {
					t.Fatalf("seed %d, step %d, %+v: %d bytes, want at most %d", seed, step, view, size, most)
				}
				if err := errors.Join(before.follow(view, viewer, u, shown), atBase(viewer, u, shards, special)); err != nil {
					t.Fatalf("seed %d, step %d: %v", seed, step, err)
				}
			}
		}
	}
	if passed < 25 || len(how) < 3 {
		t.Errorf("namespaces have passed a bound %d times, and %v were hidden; want more", passed, how)
	}
}

func count(shards *Shards) (n int) {
	for _, hosts := range shards {
		n += len(hosts)
	}
	return n
}

// specialOf returns the special hosts of all hosts.
func specialOf(h *Hosts) *Special {
	s := NewSpecial()
	for host := range h.All() {
		s.Follow([]HostChange{{New: host}})
	}
	return s
}

// atBase checks that a viewer sees hosts, and changes, as its base does, except in special shards.
func atBase(viewer Viewer, u Update, shards *Shards, special *Special) error {
	base, own := viewer.AtBase(), special.Shards(&viewer)
	for shard, hosts := range shards {
		for _, h := range hosts {
			if a, b := viewer.Entry(h), base.Entry(h); a != b && !slices.Contains(own, shard) {
				return fmt.Errorf("%+v sees %s as %v, its base as %v", viewer, h.Key, a, b)
			}
		}
	}
	touched := NewTouched(u.Hosts)
	own = touched.Shards(&viewer)
	for _, c := range u.Hosts {
		changes := base.Entry(c.Old) != base.Entry(c.New)
		if !slices.Contains(own, digest.ShardOf(c.Key())) && (viewer.Entry(c.Old) != base.Entry(c.Old) || viewer.Entry(c.New) != base.Entry(c.New)) {
			return fmt.Errorf("%+v sees the change of %s in another way than its base", viewer, c.Key())
		}
		if changes && !touched.Reaches(&base.Base) {
			return fmt.Errorf("%+v is not reached by the change of %s", base, c.Key())
		}
	}
	return nil
}

// shadow holds, for each view, its entries by the key of the host, kept up to date from changes only.
type shadow map[View]map[string]string

// follow checks that the changes lead to all entries that a viewer shows.
func (s shadow) follow(view View, viewer Viewer, u Update, shown map[string]*Entry) error {
	got, known := s[view]
	for _, c := range u.Hosts {
		if delete(got, c.Key()); got != nil && viewer.Entry(c.New) != nil {
			got[c.Key()] = string(viewer.Entry(c.New).Encoded)
		}
	}
	want := map[string]string{}
	for key, e := range shown {
		want[key] = string(e.Encoded)
	}
	if known && !u.Views && len(u.Sidecars) == 0 && !maps.Equal(got, want) {
		return fmt.Errorf("%+v: the changes lead to %v, want %v", view, got, want)
	}
	s[view] = want
	return nil
}

// views returns views of clients of all kinds.
func views(h *Hosts) []View {
	var all []View
	for _, namespace := range []string{"shop", "data", "other"} {
		for _, f := range []Families{{V4: true}, {V4: true, V6: true}} {
			for _, vips := range []bool{false, true} {
				for _, app := range []string{"web", "db"} {
					for _, place := range []Place{{"", ""}, {"east", ""}, {"west", "net1"}} {
						v := View{namespace, f, vips, h.Sidecar(namespace, NewLabels(map[string]string{"app": app})), h.Place(place.Cluster, place.Network)}
						if !slices.Contains(all, v) {
							all = append(all, v)
						}
					}
				}
			}
		}
	}
	return all
}
