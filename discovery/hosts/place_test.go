package hosts

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

// in returns a change that adds objects to a cluster.
func in(cluster string, objects ...object.Object) Change {
	return Change{Cluster: cluster, Updated: objects}
}

// headless returns a headless Service.
func headless(name string) object.Object {
	return service(name, object.Service{Headless: true})
}

// endpoints returns a slice of a Service, with an endpoint HOST=ADDRESS for each text; HOST may be
// empty.
func endpoints(name string, texts ...string) object.Object {
	s := &object.EndpointSlice{Service: name}
	for _, text := range texts {
		hostname, ip, _ := strings.Cut(text, "=")
		s.Endpoints = append(s.Endpoints, object.Endpoint{Addrs: []netip.Addr{addr(ip)}, Ready: true, Hostname: hostname})
	}
	return object.Object{Key: key(object.KindEndpointSlice, name), Slice: s}
}

// network returns the root namespace of a cluster.
func network(name string) object.Object {
	return object.Object{Key: object.Key{Kind: object.KindNamespace, Name: object.DefaultRootNamespace}, Namespace: &object.Namespace{Network: name}}
}

// at returns the addresses of the hosts that a client sees, by where it claims to be. Near
// addresses are before a "|".
func at(h *Hosts, claimed Place) map[string]string {
	viewer, out := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}, Place: h.Place(claimed.Cluster, claimed.Network)}), map[string]string{}
	for host := range h.All() {
		k := host.Key
		if e := viewer.Entry(host); e != nil {
			near, addrs := e.addrs()
			text := strings.Trim(fmt.Sprint(addrs), "[]")
			if len(near) > 0 {
				text = strings.Trim(fmt.Sprint(near), "[]") + " | " + text
			}
			out[strings.TrimSuffix(k, ".shop.svc."+domain)] = text
		}
	}
	return out
}

func wantAt(t *testing.T, h *Hosts, claimed Place, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, at(h, claimed)); diff != "" {
		t.Errorf("client at %+v: -want +got\n%s", claimed, diff)
	}
}

// D24: a client gets the cluster IP of its own cluster, and another cluster's only where its own
// has no such Service. A cluster that is removed takes its hosts with it.
func TestClusterIPsOfClusters(t *testing.T) {
	h := New(domain, 1)
	h.Update(in("", clusterIP("web", "10.0.0.1"), clusterIP("own", "10.0.0.2"), entry("x", "x.example.com", "192.0.2.1")))
	if p := h.Place("east", "net1"); p != (Place{}) {
		t.Errorf("with one cluster, there is the place %+v", p)
	}
	// The first change of a cluster adds it, whatever their order.
	h.Update(in("west", clusterIP("web", "10.2.0.1"), clusterIP("far", "10.2.0.3"), network("net2")))
	u := h.Update(in("east", clusterIP("web", "10.1.0.1"), clusterIP("far", "10.1.0.3"), external("alias", "web.shop.svc."+domain)))
	if !u.Views {
		t.Error("a cluster was added, and views stay")
	}
	own := map[string]string{"web": "10.0.0.1", "own": "10.0.0.2", "far": "10.1.0.3", "alias": "10.0.0.1", "x.example.com": "192.0.2.1"}
	wantAt(t, h, Place{"", ""}, own)
	wantAt(t, h, Place{"unknown", "net1"}, own)
	wantAt(t, h, Place{"east", ""}, map[string]string{"web": "10.1.0.1", "own": "10.0.0.2", "far": "10.1.0.3", "alias": "10.1.0.1", "x.example.com": "192.0.2.1"})
	west := map[string]string{"web": "10.2.0.1", "own": "10.0.0.2", "far": "10.2.0.3", "alias": "10.2.0.1", "x.example.com": "192.0.2.1"}
	wantAt(t, h, Place{"west", ""}, west)
	u = h.Update(Change{Cluster: "east", Dropped: true})
	if !u.Views || len(u.Hosts) != 3 {
		t.Errorf("a cluster with 3 hosts was removed: views %t, %d hosts", u.Views, len(u.Hosts))
	}
	delete(west, "alias")
	wantAt(t, h, Place{"west", ""}, west)
	own["far"] = "10.2.0.3"
	delete(own, "alias")
	wantAt(t, h, Place{"", ""}, own)
	wantAt(t, h, Place{"east", ""}, own)
	// A cluster that is removed and added at once has what was added.
	h.Update(Change{Cluster: "west", Dropped: true}, in("west", clusterIP("new", "10.2.0.4")))
	wantAt(t, h, Place{"west", ""}, map[string]string{"web": "10.0.0.1", "own": "10.0.0.2", "new": "10.2.0.4", "x.example.com": "192.0.2.1"})
	h.Update(Change{Cluster: "west", Dropped: true})
	if p := h.Place("west", ""); p != (Place{}) || h.Counts().Objects[object.KindService] != 2 {
		t.Errorf("after the last other cluster: %+v, %+v", p, h.Counts())
	}
}

// D25: a headless Service has the endpoints of all clusters of a network; the endpoints of the
// client's cluster come first. The name of a pod stands for the pod in the client's cluster, or
// else in another one.
func TestHeadlessOfClusters(t *testing.T) {
	h := New(domain, 1)
	h.Update(
		in("", headless("db"), endpoints("db", "db-0=10.0.0.9", "=10.0.0.8"), network("net1")),
		in("west", headless("db"), endpoints("db", "db-0=10.2.0.1", "db-1=10.2.0.2"), headless("kv"), endpoints("kv", "=10.2.0.3"), network("net1")),
		in("east", headless("db"), endpoints("db", "db-1=10.1.0.1", "db-2=10.1.0.2", "=10.0.0.8")),
		in("far", headless("db"), endpoints("db", "db-0=10.3.0.1", "db-3=10.3.0.2"), headless("kv"), network("net2")),
	)
	wantAt(t, h, Place{"", ""}, map[string]string{
		"db": "10.0.0.8 10.0.0.9 | 10.1.0.1 10.1.0.2 10.2.0.1 10.2.0.2", "kv": "10.2.0.3",
		"db-0.db": "10.0.0.9", "db-1.db": "10.1.0.1", "db-2.db": "10.1.0.2",
	})
	wantAt(t, h, Place{"west", "net1"}, map[string]string{
		"db": "10.2.0.1 10.2.0.2 | 10.0.0.8 10.0.0.9 10.1.0.1 10.1.0.2", "kv": "10.2.0.3",
		"db-0.db": "10.2.0.1", "db-1.db": "10.2.0.2", "db-2.db": "10.1.0.2",
	})
	far := map[string]string{ // the network of east is not known, so it counts as any
		"db": "10.3.0.1 10.3.0.2 | 10.0.0.8 10.1.0.1 10.1.0.2", "db-0.db": "10.3.0.1", "db-3.db": "10.3.0.2", "db-1.db": "10.1.0.1", "db-2.db": "10.1.0.2", "kv": "",
	}
	wantAt(t, h, Place{"far", ""}, far)
	// The network that a client claims counts before its cluster's network.
	wantAt(t, h, Place{"west", "net2"}, map[string]string{
		"db": "10.0.0.8 10.1.0.1 10.1.0.2 10.3.0.1 10.3.0.2", "db-0.db": "10.3.0.1", "db-3.db": "10.3.0.2", "db-1.db": "10.1.0.1", "db-2.db": "10.1.0.2", "kv": "",
	})
	if one, other := h.Place("", "net8"), h.Place("", "net9"); one != other {
		t.Errorf("clients of unknown networks are at %+v and %+v", one, other)
	}
	// A Service with a cluster IP in the client's cluster is what that cluster says.
	if u := h.Update(in("east", network("net2")), in("far", clusterIP("db", "10.96.3.1"))); !u.Views {
		t.Error("the network of a cluster has changed, and views stay")
	}
	wantAt(t, h, Place{"far", ""}, map[string]string{"db": "10.96.3.1", "db-1.db": "10.1.0.1", "db-2.db": "10.1.0.2", "kv": ""})
	wantAt(t, h, Place{"east", ""}, map[string]string{"db": "10.0.0.8 10.1.0.1 10.1.0.2", "db-1.db": "10.1.0.1", "db-2.db": "10.1.0.2", "kv": ""})
}

// D25: a headless Service may be for clients of its own cluster only.
func TestHeadlessOfOneCluster(t *testing.T) {
	h := New(domain, 1)
	only := service("db", object.Service{Headless: true, ClusterOnly: true})
	h.Update(
		in("", only, endpoints("db", "db-0=10.0.0.1")),
		in("east", headless("db"), endpoints("db", "db-0=10.1.0.1", "db-1=10.1.0.2")),
		in("west", headless("db"), endpoints("db", "db-2=10.2.0.1")),
	)
	wantAt(t, h, Place{"", ""}, map[string]string{"db": "10.0.0.1", "db-0.db": "10.0.0.1", "db-1.db": "10.1.0.2", "db-2.db": "10.2.0.1"})
	wantAt(t, h, Place{"east", ""}, map[string]string{"db": "10.1.0.1 10.1.0.2 | 10.2.0.1", "db-0.db": "10.1.0.1", "db-1.db": "10.1.0.2", "db-2.db": "10.2.0.1"})
	h.Update(in("east", only))
	wantAt(t, h, Place{"west", ""}, map[string]string{"db": "10.2.0.1", "db-2.db": "10.2.0.1"})
}

// An alias of a headless Service has its addresses in the same order.
func TestAliasOfClusters(t *testing.T) {
	h := New(domain, 1)
	h.Update(
		in("", headless("db"), endpoints("db", "=10.9.0.1"), external("alias", "db.shop.svc."+domain)),
		in("east", headless("db"), endpoints("db", "=10.1.0.1"), external("alias", "www.example.com")),
	)
	wantAt(t, h, Place{"", ""}, map[string]string{"db": "10.9.0.1 | 10.1.0.1", "alias": "10.9.0.1 | 10.1.0.1"})
	// In east it stands for a host outside of the mesh.
	wantAt(t, h, Place{"east", ""}, map[string]string{"db": "10.1.0.1 | 10.9.0.1", "alias": ""})
}
