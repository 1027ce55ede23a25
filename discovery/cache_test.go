package discovery

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// A client that names other namespaces again and again does not fill the memory with views.
// Those with watches and those that were used last stay.
func TestIdleViewsAreBounded(t *testing.T) {
	c := newCache(hosts.New(defaultClusterDomain, 1, hosts.NewVIPs()))
	c.waitingFor("")
	get := func(namespace string) *view {
		t.Helper()
		c.mu.Lock()
		defer c.mu.Unlock()
		v, err := c.viewLocked(subscriber{view: viewKey{View: hosts.View{Namespace: namespace}}})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	watched := get("watched")
	watched.watches[&watch{}] = struct{}{}
	used, unused := get("used"), get("unused")
	for i := range 10 * maxIdleViews {
		get(fmt.Sprint("other-", i))
		if get("used") != used {
			t.Fatalf("after %d others, the view that was used last is gone", i+1)
		}
	}
	if got := len(c.views); got != 1+maxIdleViews {
		t.Errorf("%d views, want one with a watch and %d others", got, maxIdleViews)
	}
	if get("watched") != watched {
		t.Error("the view with a watch is gone")
	}
	if get("unused") == unused {
		t.Error("the view that was used least recently is still there")
	}
}

// D31: the cache keeps the encoded tables that a view has, once, and drops those that were replaced, or
// whose last view is gone.
func TestEncodedTablesAreDropped(t *testing.T) {
	c := newCache(hosts.New(defaultClusterDomain, 1, hosts.NewVIPs()))
	c.waitingFor("")
	service := func(namespace, ip string) object.Object {
		return object.Object{
			Key:     object.Key{Kind: object.KindService, Namespace: namespace, Name: "web"},
			Service: &object.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}},
		}
	}
	update := func(change hosts.Change) {
		t.Helper()
		if _, err := c.update([]hosts.Change{change}, func(hosts.Update, hosts.Counts) {}); err != nil {
			t.Fatal(err)
		}
	}
	// want encodes all tables of clients in a namespace, and checks how many encoded tables there are.
	want := func(namespace string, n int) {
		t.Helper()
		c.mu.Lock()
		defer c.mu.Unlock()
		v, err := c.viewLocked(subscriber{view: viewKey{View: hosts.View{Namespace: namespace, Families: bothFamilies}, merge: true}})
		if err != nil {
			t.Fatal(err)
		}
		for name := range v.tables {
			if r := c.encodedLocked(v, []string{name})[0]; r == nil || r.version != v.tables[name].version {
				t.Errorf("the table of %s is encoded as %+v", name, r)
			}
		}
		if len(c.resources) != n {
			t.Errorf("%d encoded tables, want %d", len(c.resources), n)
		}
	}
	private := service("shop", "10.0.0.2")
	private.Service.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"shop"}}
	private.Key.Name = "private"
	update(hosts.Change{Updated: []object.Object{service("shop", "10.0.0.1"), service("back", "10.0.0.1"), private}})
	want("shop", 2)
	want("back", 3) // the table of shop without the private host
	update(hosts.Change{Updated: []object.Object{service("back", "10.0.0.3")}})
	want("back", 3)
	update(hosts.Change{Removed: []object.Key{private.Key}})
	want("shop", 2)
	want("back", 2)
	update(hosts.Change{Removed: []object.Key{service("back", "10.0.0.3").Key}})
	want("shop", 1)
	update(hosts.Change{Updated: []object.Object{private}})
	want("shop", 2)
	want("back", 2)
	for i := range maxIdleViews - len(c.views) {
		want(fmt.Sprint("other-", i), 2)
	}
	want("one too many", 1)
}
