package push

import (
	"fmt"
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// service returns a Service with one address.
func service(namespace, name, ip string) object.Object {
	return object.Object{
		Key:     object.Key{Kind: object.KindService, Namespace: namespace, Name: name},
		Service: &object.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}},
	}
}

// A view is dropped with its last client: a client that names other namespaces again and again does
// not fill the memory.
func TestViewsAreDropped(t *testing.T) {
	s := newService()
	var clients []*fakeClient
	for i := range 10 {
		clients = append(clients, join(t, s, fmt.Sprint("n", i%5), mergeTables))
	}
	if got := len(s.tables.views); got != 5 {
		t.Errorf("%d views of 5 namespaces", got)
	}
	for i, c := range clients {
		c.end()
		if got, want := len(s.tables.views), min(5, 9-i); got != want {
			t.Errorf("%d views with %d clients, want %d", got, 9-i, want)
		}
	}
}

// D31: the encoded tables that a view has are kept, once. Those that were replaced, or whose last view is
// gone, are dropped.
func TestEncodedTablesAreDropped(t *testing.T) {
	s := newService()
	private := service("shop", "private", "10.0.0.2")
	private.Service.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"shop"}}
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("back", "web", "10.0.0.1"), private}})
	want := func(n int) {
		t.Helper()
		if got := len(s.tables.resources); got != n {
			t.Errorf("%d encoded tables, want %d", got, n)
		}
	}
	shop := join(t, s, "shop", mergeTables)
	shop.ack()
	want(2)
	back := join(t, s, "back", mergeTables)
	back.ack()
	want(3) // the table of shop without the private host
	update := func(c hosts.Change) {
		t.Helper()
		s.updateAll(t, c)
		shop.ack()
		back.ack()
	}
	update(hosts.Change{Updated: []object.Object{service("back", "web", "10.0.0.3")}})
	want(3)
	update(hosts.Change{Removed: []object.Key{private.Key}})
	want(2)
	update(hosts.Change{Removed: []object.Key{service("back", "web", "10.0.0.3").Key}})
	want(1)
	update(hosts.Change{Updated: []object.Object{private}})
	want(2)
	back.end()
	want(1)
	shop.end()
	want(0)
}

// D31: a change is encoded once for all clients, also of other namespaces, that have the same table.
func TestChangesAreShared(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	var clients []*fakeClient
	for i := range 10 {
		c := join(t, s, fmt.Sprint("n", i), mergeHosts)
		c.ack()
		clients = append(clients, c)
	}
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.2")}})
	for _, c := range clients {
		c.last.Nonce = ""
		if want := clients[0].last; !proto.Equal(c.last, want) || len(want.GetResources()) != 1 {
			t.Errorf("a client was sent %v, another one %v", c.last, want)
		}
	}
	if n := len(s.tables.changes.encoded); n != 1 {
		t.Errorf("%d changes were encoded, want 1", n)
	}
}

// D33: a client that does not answer is sent what has changed meanwhile, in one push.
func TestChangesAreMerged(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "other", "10.0.0.9")}})
	c := join(t, s, "shop", mergeHosts)
	first := c.last.GetNonce()
	for i := range 3 * maxHistory {
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", fmt.Sprintf("10.1.%d.%d", i/250, i%250))}})
		if c.last.GetNonce() != first {
			t.Fatal("a push was sent before the last one was acknowledged")
		}
		if n := len(s.tables.views[c.view.key].history.steps); n > maxHistory {
			t.Fatalf("%d changes are kept, want at most %d", n, maxHistory)
		}
		if i == 99 {
			c.ack()
			first = c.last.GetNonce()
			if _, n := c.change(); n > 300 {
				t.Errorf("100 changes of one host are sent in %d bytes", n)
			}
		}
	}
	c.ack()
	if change, _ := c.change(); len(change.GetComplete()) == 0 {
		t.Error("a client that was behind by more than is kept was not sent the whole table")
	}
}

// D41: a client that has rejected a change is not sent it again until something has changed, or until it
// subscribes again: a response without a resource would say that there are no hosts.
func TestRejectedChange(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	c := join(t, s, "shop", mergeHosts)
	c.variant = variantSotw
	c.ack()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.2")}})
	sent := c.last.GetNonce()
	c.nack()
	if c.last.GetNonce() != sent {
		t.Errorf("it was sent %v at once", c.last)
	}
	if err := c.handle(request{typeURL: TypeURL}); err != nil {
		t.Fatal(err)
	}
	if change, _ := c.change(); len(change.GetComplete()) == 0 || c.last.GetNonce() == sent {
		t.Errorf("it was sent %v, want the whole table", change)
	}
}

// D41: a client that rejects a change after the table has changed again is sent the table of now: the one that
// it has rejected is not served any more.
func TestRejectionOfAnOldChange(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	c := join(t, s, "shop", mergeHosts)
	c.ack()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.2")}})
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.3")}})
	sent := c.last.GetNonce()
	c.nack()
	if c.last.GetNonce() == sent {
		t.Fatal("the client was not sent the table of now")
	}
	if change, _ := c.change(); len(change.GetComplete()) == 0 {
		t.Errorf("the client was sent %v, want the whole table", change)
	}
	c.ack()
	if state := s.Consistency().Views[0]; len(state.Others) > 0 {
		t.Errorf("the state is %+v, want the client up to date", state)
	}
}

// D41: a client that has rejected its table is not sent it again because views are made anew, for example when
// a Sidecar of another namespace changes. It is if its table changes with them.
func TestRejectedTableOfANewView(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("data", "db", "10.0.0.2")}})
	c := join(t, s, "shop", mergeHosts)
	c.nack()
	sent := c.last.GetNonce()
	sidecar := func(namespace, of string) object.Object {
		return object.Object{
			Key:     object.Key{Kind: object.KindSidecar, Namespace: namespace, Name: "s"},
			Sidecar: &object.Sidecar{Egress: []object.EgressHost{{Namespace: of, Host: "*"}}},
		}
	}
	for range 3 {
		s.updateAll(t, hosts.Change{Updated: []object.Object{sidecar("other", "data")}})
		s.updateAll(t, hosts.Change{Removed: []object.Key{sidecar("other", "").Key}})
		if c.last.GetNonce() != sent {
			t.Fatalf("the client was sent %v again", c.last)
		}
	}
	s.updateAll(t, hosts.Change{Updated: []object.Object{sidecar("shop", "data")}})
	if c.last.GetNonce() == sent {
		t.Fatal("the client was not sent the table that its Sidecar leaves")
	}
	if change, _ := c.change(); len(change.GetComplete()) == 0 {
		t.Errorf("the client was sent %v, want the whole table", change)
	}
}

// D31: clients that connect again and again, with digests of other hosts each time, do not fill the memory.
func TestChangesAreBounded(t *testing.T) {
	s := newService()
	services := make([]object.Object, 400) // with long names: few of them fill the memory
	for i := range services {
		services[i] = service("shop", fmt.Sprintf("%04000d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250))
	}
	s.updateAll(t, hosts.Change{Updated: services})
	c := join(t, s, "shop", mergeHosts)
	size := 0
	for i := range 80 {
		c.position = c.view.position(digest.All())
		c.position.missing[i/8] &^= 1 << (i % 8) // a client that has one of the buckets
		c.ack()
		_, n := c.change()
		size += n
		kept := 0
		for _, r := range s.tables.changes.encoded {
			kept += len(r.table)
		}
		if kept > maxChanges || kept != s.tables.changes.size || kept < min(size, maxChanges/2) {
			t.Fatalf("%d bytes of %d are kept, and %d counted", kept, size, s.tables.changes.size)
		}
	}
	if size < 2*maxChanges {
		t.Errorf("the changes have %d bytes", size)
	}
}
