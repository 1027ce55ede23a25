package push

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

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

// D63: namespaces that see a host because of a list of namespaces share its shard, and its bytes, after a change.
func TestViewsShareShards(t *testing.T) {
	s := newService()
	exported := service("evil", "api", "10.0.0.1")
	exported.Service.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"a", "b"}}
	s.updateAll(t, hosts.Change{Updated: []object.Object{exported, service("shop", "web", "10.0.0.2")}})
	a, b := join(t, s, "a", modeNamed), join(t, s, "b", modeNamed)
	changed := *exported.Service
	changed.ClusterIPs, exported.Service = []netip.Addr{netip.MustParseAddr("10.0.0.3")}, &changed
	s.updateAll(t, hosts.Change{Updated: []object.Object{exported}})
	for number, one := range a.view.table.own {
		if one == nil || one != b.view.table.own[number] {
			t.Errorf("shard %d: %p and %p", number, one, b.view.table.own[number])
		}
	}
	if len(a.view.table.own) != 1 {
		t.Errorf("%d shards of one exported host", len(a.view.table.own))
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
			clients = append(clients, join(t, s, fmt.Sprint("n", i%5), modeNamed))
		}
		first := clients[0].view
		for _, c := range clients {
			c.end()
		}
		s.tables.sweep()
		if got := views(); got != 5 {
			t.Errorf("%d views of 5 namespaces", got)
		}
		if again := join(t, s, "n0", modeNamed); again.view != first {
			t.Error("the view was made again")
		}
		s.tables.sweep()
		if got := views(); got != 1 {
			t.Errorf("%d views of 1 namespace", got)
		}
	})
}

// bytesOf returns the buffers of a table that must be sent to a client in the named mode.
func (c *fakeClient) bytesOf() (all []*encoded) {
	now, of, _ := c.service.tables.current(c.session)
	for i := range digest.Count {
		if now.shard(i) != nil {
			e := c.service.tables.encoded(of, now, i)
			all = append(all, e)
		}
	}
	return all
}

// D31: clients share the bytes of shards, also with clients of other namespaces, unless they see another host in a shard.
func TestShardsAreShared(t *testing.T) {
	s := newService()
	private := service("shop", "private", "10.0.0.2")
	private.Service.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"shop"}}
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "api", "10.0.0.3"), private}})
	shop, back, front := join(t, s, "shop", modeNamed), join(t, s, "back", modeWhole), join(t, s, "front", modeNamed)
	own, shared := shop.bytesOf(), back.bytesOf()
	if !slices.Equal(shared, front.bytesOf()) || len(shared) != 2 || len(own) != 3 {
		t.Errorf("shards %v and %v, want the same two; of the own namespace %v, want three", shared, front.bytesOf(), own)
	}
	for _, e := range shared {
		if !slices.Contains(own, e) {
			t.Error("a shard without a private host has other bytes in its own namespace")
		}
	}
	if back.view.table != front.view.table || back.view.table == shop.view.table {
		t.Error("equal tables are not shared, or different ones are")
	}
}

// D31, D33: the bytes of a table are dropped when no stream sends them, and made again: a client that does not answer
// keeps none of an earlier table.
func TestBytesAreDropped(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: mesh(2000, 2)})
	c := join(t, s, "ns0", modeNamed)
	sent := c.hosts()
	runtime.GC()
	runtime.GC()
	kept := 0
	now, _, _ := s.tables.current(c.session)
	for i := range digest.Count {
		if e := now.shard(i); e != nil && e.bytes.Value() != nil {
			kept++
		}
	}
	again := join(t, s, "ns1", modeNamed).hosts()
	if kept > 0 || len(sent) != 2000 || !maps.Equal(sent, again) {
		t.Errorf("%d shards keep their bytes; the clients have %d and %d hosts", kept, len(sent), len(again))
	}
}

// D33: a client that does not answer is sent what has changed meanwhile, in one push, also a host that has gone.
func TestChangesAreMerged(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "other", "10.0.0.9")}})
	c := join(t, s, "shop", modeNamed)
	first := c.last.GetNonce()
	brief := service("shop", "brief", "10.0.0.2")
	s.updateAll(t, hosts.Change{Updated: []object.Object{brief}})
	for i := range 500 {
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", fmt.Sprintf("10.1.%d.%d", i/250, i%250))}})
	}
	s.updateAll(t, hosts.Change{Removed: []object.Key{brief.Key, service("shop", "other", "10.0.0.9").Key}})
	if c.last.GetNonce() != first {
		t.Fatal("a push was sent before the last one was acknowledged")
	}
	c.ack()
	gone := strconv.Itoa(digest.ShardOf("other.shop.svc.cluster.local"))
	if sent := c.hosts(); len(sent) != 1 || sent["web.shop.svc.cluster.local"] == "" || !slices.Equal(c.last.GetRemovedResources(), []string{gone}) {
		t.Errorf("sent are %v, and removed %v, want %s removed", sent, c.last.GetRemovedResources(), gone)
	}
}

// D37: a client that connects again is sent the shards that have changed meanwhile, and the names of resources that it
// must remove: of shards without hosts now, and of other servers.
func TestReconnect(t *testing.T) {
	s := newService()
	objects := mesh(1000, 1)
	s.updateAll(t, hosts.Change{Updated: objects})
	c := join(t, s, "ns0", modeNamed)
	versions := map[string]string{"of another server": "1", "512": "2", "007": "3", "": "4"}
	for name, r := range c.resources() {
		versions[name] = r.version
	}
	c.end()
	empty := 0
	for versions[strconv.Itoa(empty)] != "" {
		empty++
	}
	versions[strconv.Itoa(empty)] = "nt:AAAAAAAAAAA"
	changed := objects[0]
	changed.Service = &object.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr("10.9.9.9")}}
	s.updateAll(t, hosts.Change{Updated: []object.Object{changed}})
	again := joining{variant: variantDelta, mode: modeNamed, versions: versions, metadata: map[string]any{"NAMESPACE": "ns0"}}
	c = again.join(t, s)
	want := []string{"", "007", "512", "of another server", strconv.Itoa(empty)}
	if got := c.resources(); len(got) != 1 || got[strconv.Itoa(digest.ShardOf("web0.ns0.svc.cluster.local"))].version == "" || !slices.Equal(c.last.GetRemovedResources(), want) {
		t.Errorf("sent are %d resources, and removed %q, want one, and %q removed", len(got), c.last.GetRemovedResources(), want)
	}
	for name, r := range c.resources() {
		versions[name] = r.version
	}
	c.end()
	for _, name := range want {
		delete(versions, name)
	}
	c = again.join(t, s)
	if len(c.last.GetResources())+len(c.last.GetRemovedResources()) > 0 {
		t.Errorf("a client with the table was sent %v", c.last)
	}
}

// D41: a client that has rejected a push is not sent its content again until something has changed, or until it
// subscribes again: a response without a resource would say that there are no hosts.
func TestRejectedPush(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "api", "10.0.0.1")}})
	for _, as := range [][2]string{{variantSotw, modeWhole}, {variantDelta, modeWhole}, {variantDelta, modeNamed}} {
		c := joining{variant: as[0], mode: as[1], metadata: map[string]any{"NAMESPACE": "shop"}}.join(t, s)
		c.ack()
		s.updateAll(t, c.edit(2))
		sent := c.last.GetNonce()
		c.nack()
		if c.last.GetNonce() != sent {
			t.Errorf("it was sent %v at once", c.last)
		}
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "api", "10.0.0.2")}})
		if n := len(c.hosts()); n != 2 || c.last.GetNonce() == sent {
			t.Errorf("%v: it was sent %d hosts after the next change, want both", as, n)
		}
		if c.nack(); !c.delta() {
			c.request(&discoveryv3.DiscoveryRequest{TypeUrl: TypeURL})
			if n := len(c.hosts()); n != 2 {
				t.Errorf("it was sent %d hosts after it has subscribed again", n)
			}
		}
		c.end()
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("shop", "api", "10.0.0.1")}})
	}
}

// D41: a client that rejects a change after the table has changed again is sent the current table:
// the rejected one is not served any more.
func TestRejectionOfAnOldChange(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	c := join(t, s, "shop", modeNamed)
	c.ack()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.2")}})
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.3")}})
	sent := c.last.GetNonce()
	c.nack()
	if c.last.GetNonce() == sent {
		t.Fatal("the client was not sent the current table")
	}
	if n := len(c.hosts()); n != 1 {
		t.Errorf("the client was sent %d hosts, want the one that it lacks", n)
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
	c := join(t, s, "shop", modeNamed)
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
	if n := len(c.hosts()); n != 1 {
		t.Errorf("the client was sent %d hosts, want the one that it lacks", n)
	}
}

// C9, D33: a client that connects, or answers, does not wait for a change that is being reported.
func TestClientsDoNotWaitForReport(t *testing.T) {
	s := newService()
	s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1")}})
	before := join(t, s, "shop", modeNamed)
	reporting, reported := make(chan struct{}), make(chan struct{})
	done := make(chan []*session)
	go func() {
		_, woken := s.tables.update([]hosts.Change{{Updated: []object.Object{service("shop", "web", "10.0.0.2")}}}, func(hosts.Update, hosts.Counts) {
			close(reporting)
			<-reported
		})
		done <- woken
	}()
	<-reporting
	before.ack()
	during := join(t, s, "data", modeNamed) // a test that hangs here has failed
	during.ack()
	close(reported)
	if woken := <-done; len(woken) != 2 {
		t.Errorf("%d clients are sent the change, want 2", len(woken))
	}
}

// D12, D32: a Sidecar of a namespace changes what its clients see, and is nothing to others, which keep their base.
func TestSidecarOfOneNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService()
		s.updateAll(t, hosts.Change{Updated: []object.Object{service("shop", "web", "10.0.0.1"), service("data", "db", "10.0.0.2")}})
		shop, data := join(t, s, "shop", modeNamed), join(t, s, "data", modeNamed)
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
		if of, own := shop.view.base.table.hosts(), shop.view.table.hosts(); shop.view.base == base || of != 0 || own != 1 {
			t.Errorf("the client has %d hosts, and its base %d, want 1 and 0", own, of)
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
		s.tables.sweep()
		s.tables.sweep()
		if n := len(s.tables.bases); n != 1 {
			t.Errorf("%d bases after the last client of the Sidecar, want 1", n)
		}
	})
}

// TestRoomForTables checks that a client needs room only for a large table that not all namespaces share.
func TestRoomForTables(t *testing.T) { // D64
	synctest.Test(t, func(t *testing.T) {
		s, full := newService(), errors.New("full")
		s.cfg.Room = func() error { return full }
		services := func(from, to int) (c hosts.Change) {
			for i := from; i < to; i++ {
				c.Updated = append(c.Updated, service("shop", fmt.Sprint("web-", i), "10.0.0.1"))
			}
			return c
		}
		s.updateAll(t, services(0, 100), hosts.Change{Updated: []object.Object{{
			Key:     object.Key{Kind: object.KindSidecar, Namespace: "shop", Name: "s"},
			Sidecar: &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{{Namespace: ".", Host: "*"}}}}},
		}}})
		shop, data := join(t, s, "shop", modeNamed), join(t, s, "data", modeNamed)
		shop.ack()
		data.ack()
		if _, woken := s.tables.update([]hosts.Change{services(100, 1600)}, func(hosts.Update, hosts.Counts) {}); len(woken) != 2 {
			t.Fatalf("%d clients are sent the change, want 2", len(woken))
		}
		var ended error
		shop.fail = func(err error) { ended = err }
		if err, again := shop.push(), shop.push(); !errors.Is(err, full) || !errors.Is(again, full) || !errors.Is(ended, full) {
			t.Errorf("a table of its own: %v, at the next attempt %v, the stream ends with %v, want the error of Room", err, again, ended)
		}
		if err := data.push(); err != nil {
			t.Errorf("a table that all namespaces share: %v", err)
		}
	})
}
