package push

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// pass lets time pass, and all goroutines of the bubble do what they do then.
func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the bubble's clock
	synctest.Wait()
}

// service returns a Service with one address.
func service(namespace, name, ip string) object.Object {
	return object.Object{
		Key:     object.Key{Kind: object.KindService, Namespace: namespace, Name: name},
		Service: &object.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}},
	}
}

// D63: a view is kept for some seconds after its last client, and then dropped: a client that connects again and again
// makes no new ones, and one that names other namespaces again and again does not fill the memory.
func TestViewsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService()
		views := func() (n int) {
			synctest.Wait()
			s.tables.mu.Lock()
			defer s.tables.mu.Unlock()
			for _, b := range s.tables.bases {
				n += len(b.views)
			}
			return n
		}
		var clients []*fakeClient
		for i := range 10 {
			clients = append(clients, join(t, s, fmt.Sprint("n", i%5), mergeHosts))
		}
		first := clients[0].view
		for _, c := range clients {
			c.end()
		}
		pass(keepViews - time.Second)
		if got := views(); got != 5 {
			t.Errorf("%d views of 5 namespaces", got)
		}
		if again := join(t, s, "n0", mergeHosts); again.view != first {
			t.Error("the view was made again")
		}
		pass(time.Minute)
		if got := views(); got != 1 {
			t.Errorf("%d views of 1 namespace", got)
		}
		for i := range maxUnused + 10 { // dropped shards count no more
			join(t, s, fmt.Sprint("m", i), mergeHosts).end()
		}
		if got := views(); got != 1+maxUnused {
			t.Errorf("%d views are kept, want %d", got, 1+maxUnused)
		}
		pass(time.Minute)
		if got := views(); got != 1 {
			t.Errorf("%d views of 1 namespace", got)
		}
	})
}

// D31: the encoded shards of a table are kept once; a changed shard is dropped.
func TestEncodedShardsAreDropped(t *testing.T) {
	s := newService()
	private := service("shop", "private", "10.0.0.2")
	private.Service.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"shop"}}
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), private}})
	var clients []*fakeClient
	for _, namespace := range []string{"shop", "back", "front"} {
		clients = append(clients, join(t, s, namespace, ""))
		clients[len(clients)-1].ack()
	}
	want := func(n int) {
		t.Helper()
		if got := len(s.tables.shards.encoded); got != n {
			t.Errorf("%d encoded shards, want %d", got, n)
		}
	}
	want(3) // one is empty
	for i := range 5 {
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", fmt.Sprint("10.0.1.", i))}})
		for _, c := range clients {
			c.ack()
		}
		want(3)
	}
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
	if n := len(s.tables.resources.encoded); n != 1 {
		t.Errorf("%d changes were encoded, want 1", n)
	}
}

// D33: a client that does not answer is sent what has changed meanwhile, in one push.
func TestChangesAreMerged(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "other", "10.0.0.9")}})
	c := join(t, s, "shop", mergeHosts)
	first := c.last.GetNonce()
	for i := range 3 * maxRecent {
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", fmt.Sprintf("10.1.%d.%d", i/250, i%250))}})
		if c.last.GetNonce() != first {
			t.Fatal("a push was sent before the last one was acknowledged")
		}
		if n := s.tables.recent.size; n > maxRecent {
			t.Fatalf("%d changes are kept, want at most %d", n, maxRecent)
		}
		if i == 99 {
			c.ack()
			first = c.last.GetNonce()
			if change, n := c.change(); n > 300 || len(change.GetComplete()) > 0 {
				t.Errorf("100 changes of one host are sent in %d bytes: %v", n, change)
			}
		}
	}
	c.ack()
	var shard digest.Set
	shard.Add(digest.ShardOf("web.shop.svc.cluster.local"))
	if change, n := c.change(); !bytes.Equal(change.GetComplete(), shard[:]) || n > 300 {
		t.Errorf("a client that was behind by more than is kept was sent %d bytes, want the shard that has changed: %v", n, change)
	}
}

// D33: a client that is slow, or away, is not sent a host that was added and removed meanwhile.
func TestHostThatComesAndGoes(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	c := join(t, s, "shop", mergeHosts)
	brief := service("shop", "brief", "10.0.0.2")
	s.updateAll(t, hosts.Change{Updated: []object.Object{brief}})
	s.updateAll(t, hosts.Change{Removed: []object.Key{brief.Key}, Updated: []object.Object{service("shop", "web", "10.0.0.3")}})
	c.ack()
	sent := entriesIn(t, c.last.GetResources()[0].GetResource().GetValue())
	if change, _ := c.change(); len(sent) != 1 || sent["web.shop.svc.cluster.local"] == "" || len(change.GetRemoved()) > 0 {
		t.Errorf("sent are %v, and removed %v", sent, change.GetRemoved())
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
	if err := c.handle(&Request{typeURL: TypeURL}); err != nil {
		t.Fatal(err)
	}
	if change, _ := c.change(); len(change.GetComplete()) == 0 || c.last.GetNonce() == sent {
		t.Errorf("it was sent %v, want the whole table", change)
	}
}

// D41: a client that rejects a change after the table has changed again is sent the current table:
// the rejected one is not served any more.
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
		t.Fatal("the client was not sent the current table")
	}
	if change, _ := c.change(); len(change.GetComplete()) == 0 {
		t.Errorf("the client was sent %v, want the whole table", change)
	}
	c.ack()
	if a := c.shown(); !a.Current || a.State != StateCurrent || a.Nack == nil {
		t.Errorf("the state is %+v, want the client up to date after a NACK", a)
	}
}

// D41: a client that has rejected its table is not sent it again when views are made again, for
// example because a Sidecar of another namespace changes. It is sent its table if that changes.
func TestRejectedTableOfANewView(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("data", "db", "10.0.0.2")}})
	c := join(t, s, "shop", mergeHosts)
	c.nack()
	sent := c.last.GetNonce()
	sidecar := func(namespace, of string) object.Object {
		return object.Object{
			Key:     object.Key{Kind: object.KindSidecar, Namespace: namespace, Name: "s"},
			Sidecar: &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{{Namespace: of, Host: "*"}}}}},
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
func TestResourcesAreBounded(t *testing.T) {
	s := newService()
	services := make([]object.Object, 400) // with long names: few of them fill the memory
	for i := range services {
		services[i] = service("shop", fmt.Sprintf("%04000d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250))
	}
	s.updateAll(t, hosts.Change{Updated: services})
	c := join(t, s, "shop", mergeHosts)
	size := 0
	for i := range 80 {
		c.position.missing = digest.All()
		c.position.missing[i/8] &^= 1 << (i % 8) // a client that has one of the shards
		c.ack()
		_, n := c.change()
		size += n
		kept := 0
		for _, r := range s.tables.resources.encoded {
			kept += r.size + overhead
		}
		if kept > maxEncoded || kept != s.tables.resources.size || kept < min(size, maxEncoded/2) {
			t.Fatalf("%d bytes of %d are kept, and %d counted", kept, size, s.tables.resources.size)
		}
	}
	if size < 2*maxEncoded {
		t.Errorf("the resources have %d bytes", size)
	}
}

// C9, D33: a client that connects, or answers, does not wait for a change that is being written to disk.
func TestClientsDoNotWaitForDisk(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	before := join(t, s, "shop", mergeHosts)
	writing, written := make(chan struct{}), make(chan struct{})
	done := make(chan []*session)
	go func() {
		_, woken := s.tables.update([]hosts.Change{{Updated: []object.Object{service("shop", "web", "10.0.0.2")}}}, nil, func(hosts.Update, hosts.Counts) {
			close(writing)
			<-written
		})
		done <- woken
	}()
	<-writing
	before.ack()
	during := join(t, s, "data", mergeHosts) // a test that hangs here has failed
	during.ack()
	close(written)
	if woken := <-done; len(woken) != 2 {
		t.Errorf("%d clients are sent the change, want 2", len(woken))
	}
}

// D12, D32: a Sidecar of a namespace changes what its clients see, and is nothing to others, which keep their base.
func TestSidecarOfOneNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService()
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("data", "db", "10.0.0.2")}})
		shop, data := join(t, s, "shop", mergeHosts), join(t, s, "data", mergeHosts)
		shop.ack()
		data.ack()
		base, nonce := data.view.base, data.nonce
		sidecar := object.Object{
			Key:     object.Key{Kind: object.KindSidecar, Namespace: "shop", Name: "s"},
			Sidecar: &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{{Namespace: ".", Host: "*"}}}}},
		}
		s.updateAll(t, hosts.Change{Updated: []object.Object{sidecar}})
		if data.view.base != base || data.nonce != nonce {
			t.Error("the client of another namespace has another view, or was sent something")
		}
		if shop.view.base == base || shop.view.base.entries != 0 || shop.view.entries != 1 || shop.view.sum() == base.total {
			t.Errorf("the client has %d hosts of its base and %d of its own, want 0 and 1", shop.view.base.entries, shop.view.entries)
		}
		if n := len(s.tables.bases); n != 2 {
			t.Errorf("%d bases, want 2", n)
		}
		shop.ack()
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("data", "db", "10.0.0.3")}})
		if shop.pending {
			t.Error("the client was sent a host that its Sidecar hides")
		}
		shop.end()
		pass(keepViews)
		if n := len(s.tables.bases); n != 1 {
			t.Errorf("%d bases after the last client of the Sidecar, want 1", n)
		}
	})
}
