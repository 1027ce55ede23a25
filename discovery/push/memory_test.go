package push

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// heap returns how many bytes are in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // far below
}

// D33: clients that are behind, each by another number of changes, do not fill the memory.
func TestClientsBehind(t *testing.T) {
	const clients, hostsEach = 400, 5
	s := newService()
	services := mesh(clients*hostsEach, 100)
	s.updateAll(t, hosts.Change{Updated: services})
	all := joinAll(t, s, clients)
	for _, c := range all {
		c.last = nil
	}
	before := heap()
	answer := func(c *fakeClient) {
		if err := c.handle(&Request{typeURL: TypeURL, nonce: c.nonce}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range all {
		if i > 0 {
			answer(all[i-1]) // it is sent this change, and answers after all
		}
		changed := services[i*hostsEach:][:hostsEach]
		for j := range changed {
			changed[j].Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{11, byte(j), byte(i >> 8), byte(i)})}}
		}
		s.updateAll(t, hosts.Change{Updated: changed})
	}
	for _, c := range all {
		answer(c)
	}
	if more := heap() - before; more > 46<<20 {
		t.Errorf("%d MiB more", more>>20)
	}
	runtime.KeepAlive(all)
}

// D12, D32: a Sidecar that is edited again and again does not fill the memory.
func TestEditedSidecar(t *testing.T) {
	const entries, claims = 40, 11
	s := newService()
	var all []object.Object
	for i := range entries {
		for c := range claims {
			all = append(all, object.Object{
				Key: object.Key{Kind: object.KindServiceEntry, Namespace: fmt.Sprint("ns", c), Name: fmt.Sprint("e", i)},
				Entry: &object.ServiceEntry{
					Hosts: []string{fmt.Sprintf("api%d.example.com", i)}, HasAddresses: true,
					Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i), byte(c)})},
				},
			})
		}
	}
	s.updateAll(t, hosts.Change{Updated: all})
	c := join(t, s, "shop", mergeHosts)
	c.ack()
	before := heap()
	for i := range 1 << claims {
		sidecar := object.Object{Key: object.Key{Kind: object.KindSidecar, Namespace: "shop", Name: "s"}, Sidecar: &object.Sidecar{}}
		for n := range claims {
			if i>>n&1 == 1 {
				sidecar.Sidecar.Egress = append(sidecar.Sidecar.Egress, object.EgressHost{Namespace: fmt.Sprint("ns", n), Host: "*"})
			}
		}
		s.updateAll(t, hosts.Change{Updated: []object.Object{sidecar}})
		c.ack()
	}
	s.tables.shards.clear() // which are bounded
	if more := heap() - before; more > 8<<20 {
		t.Errorf("%d MiB more", more>>20)
	}
	runtime.KeepAlive(s)
}

// D11, D32: the cost of a ServiceEntry is not the product of the numbers of its hosts and of the namespaces in its exportTo.
func TestLongExportTo(t *testing.T) {
	const names, namespaces = 200, 5000
	entry := object.Object{
		Key:   object.Key{Kind: object.KindServiceEntry, Namespace: "shop", Name: "e"},
		Entry: &object.ServiceEntry{HasAddresses: true, ExportTo: object.ExportTo{Restricted: true}},
	}
	for i := range names {
		entry.Entry.Hosts = append(entry.Entry.Hosts, fmt.Sprintf("h%d.example.com", i))
	}
	for i := range namespaces {
		entry.Entry.ExportTo.Namespaces = append(entry.Entry.ExportTo.Namespaces, fmt.Sprintf("ns%05d", i))
	}
	s := newService()
	c := join(t, s, "ns00007", mergeHosts)
	c.ack()
	before := heap()
	for i := range 3 {
		edited := *entry.Entry
		edited.Addrs = []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}
		entry.Entry = &edited
		s.updateAll(t, hosts.Change{Updated: []object.Object{entry}})
		if table := c.last.GetResources()[0].GetResource().GetValue(); len(table) < 20*names {
			t.Errorf("the client was sent %d bytes", len(table))
		}
		c.ack()
	}
	if more := heap() - before; more > 8<<20 {
		t.Errorf("%d MiB more", more>>20)
	}
	s.updateAll(t, hosts.Change{Removed: []object.Key{entry.Key}})
	if change, _ := c.change(); len(change.GetRemoved()) != names {
		t.Errorf("%d hosts are removed", len(change.GetRemoved()))
	}
	runtime.KeepAlive(s)
}

// D33: a host with many addresses that changes again and again does not fill the memory.
func TestLargeHostChanges(t *testing.T) {
	const addrs, edits = 3000, 300
	s := newService()
	web := object.Key{Kind: object.KindService, Namespace: "shop", Name: "web"}
	s.updateAll(t, hosts.Change{Updated: []object.Object{{Key: web, Service: &object.Service{Headless: true}}}})
	c := join(t, s, "shop", mergeHosts)
	c.ack()
	var before int64
	for i := range edits {
		slice := &object.EndpointSlice{Service: web.Name, Endpoints: make([]object.Endpoint, addrs)}
		for j := range slice.Endpoints {
			slice.Endpoints[j] = object.Endpoint{Ready: i%addrs != j, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(j >> 8), byte(j)})}}
		}
		s.updateAll(t, hosts.Change{Updated: []object.Object{{Key: object.Key{Kind: object.KindEndpointSlice, Namespace: "shop", Name: "web-1"}, Slice: slice}}})
		if c.ack(); i == 0 {
			before = heap()
		}
	}
	if more := heap() - before; more > 24<<20 {
		t.Errorf("%d MiB more", more>>20)
	}
	runtime.KeepAlive(s)
}
