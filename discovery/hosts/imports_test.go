package hosts

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

func serviceImport(name string, s object.ServiceImport) object.Object {
	return object.Object{Key: key(object.KindServiceImport, name), Import: &s}
}

// importedFrom returns a slice of a ServiceImport with endpoints of a cluster, as endpoints does.
func importedFrom(cluster, name string, texts ...string) object.Object {
	o := endpoints(name, texts...)
	o.Key.Name, o.Slice.Service, o.Slice.Import, o.Slice.Cluster = name+"-"+cluster, "", name, cluster
	o.Slice.Ports = object.NewPorts([]object.Port{{Name: "sql", Number: 5432, Protocol: "TCP"}})
	return o
}

// withoutDomain returns hosts without the domain of ServiceImports.
func withoutDomain(hosts map[string]string) map[string]string {
	out := map[string]string{}
	for host, ips := range hosts {
		out[strings.TrimSuffix(host, ".shop.svc.clusterset.local")] = ips
	}
	return out
}

// D26: a ServiceImport with an address has it, without any Service.
func TestClusterSetIP(t *testing.T) {
	h := New(domain, 1)
	ips := []netip.Addr{addr("10.112.0.1"), addr("fd00::9")}
	h.Update(in("", serviceImport("web", object.ServiceImport{IPs: ips, Ports: object.NewPorts([]object.Port{{Number: 80, Protocol: "TCP"}})}),
		importedFrom("east", "web", "=10.1.0.1")))
	want := map[string]string{"web.shop.svc.clusterset.local": `web.shop.svc.clusterset.local ips:"10.112.0.1" ips:"fd00::9" registry:"Kubernetes" ports:{number:80}`}
	got := seen(t, h, View{Namespace: "data", Families: Families{V4: true, V6: true}})
	for host, text := range got {
		got[host] = strings.Join(strings.Fields(text), " ")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	// Each cluster has its own address, and a Service changes nothing.
	h.Update(
		in("", clusterIP("web", "10.96.0.1")),
		in("east", serviceImport("web", object.ServiceImport{IPs: []netip.Addr{addr("10.113.0.1")}})), in("west", clusterIP("other", "10.96.0.2")),
	)
	for claimed, ip := range map[Place]string{{}: "10.112.0.1", {Cluster: "east"}: "10.113.0.1", {Cluster: "west"}: "10.112.0.1"} {
		if got := at(h, claimed)["web.shop.svc.clusterset.local"]; got != ip {
			t.Errorf("%+v: %s, want %s", claimed, got, ip)
		}
	}
	h.Update(Change{Removed: []object.Key{key(object.KindServiceImport, "web")}}, Change{Cluster: "east", Dropped: true})
	wantAt(t, h, Place{}, map[string]string{"web": "10.96.0.1", "other": "10.96.0.2"})
}

// D27: a headless ServiceImport has the ready endpoints of all clusters, which have names of their own.
func TestHeadlessImport(t *testing.T) {
	h := New(domain, 1)
	unready := importedFrom("west", "db", "db-1=10.2.0.2")
	unready.Key.Name, unready.Slice.Endpoints[0].Ready = "db-unready", false
	own := importedFrom("west", "db", "db-0=10.2.0.1", "=fd00::", "=10.2.0.3")
	own.Slice.Service = "derived-db" // of a Service that the controller has made
	h.Update(in("", serviceImport("db", object.ServiceImport{Headless: true, IPs: []netip.Addr{addr("192.0.2.1")}}),
		importedFrom("east", "db", "db-0=10.1.0.1", "db-1=10.1.0.2"), own, unready, headless("derived-db"), importedFrom("", "db", "db-9=10.9.0.1")))
	want := map[string]string{
		"db": "10.1.0.1 10.1.0.2 10.2.0.1 10.2.0.3 10.9.0.1", "db-0.east.db": "10.1.0.1", "db-1.east.db": "10.1.0.2", "db-0.west.db": "10.2.0.1", "10-2-0-3.west.db": "10.2.0.3", "fd00--0.west.db": "",
		"derived-db": "10.2.0.1 10.2.0.3", "db-0.derived-db": "10.2.0.1",
	}
	if diff := cmp.Diff(want, withoutDomain(at(h, Place{}))); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	entries := seen(t, h, View{Namespace: "shop", Families: Families{V4: true, V6: true}})
	if text := entries["db.shop.svc.clusterset.local"]; !strings.Contains(text, `name:"sql"`) || !strings.Contains(text, "headless:true") || strings.Contains(text, "shortname") {
		t.Errorf("the entry is %s", text)
	}
	if text := entries["fd00--0.west.db.shop.svc.clusterset.local"]; !strings.Contains(text, `ips:"fd00::"`) {
		t.Errorf("the entry of fd00:: is %q", text)
	}
	// A Sidecar shows or hides the ServiceImport with all its endpoints.
	sidecar := &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{{Namespace: "shop", Host: "db.shop.svc.clusterset.local"}}}}}
	h.Update(in("", object.Object{Key: key(object.KindSidecar, "s"), Sidecar: sidecar}))
	viewer := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}, Sidecar: h.Sidecar("shop", nil)})
	shown := 0
	for host := range h.All() {
		if viewer.Entry(host) != nil {
			shown++
		}
	}
	if shown != 6 {
		t.Errorf("the Sidecar shows %d hosts, want 6", shown)
	}
}

// D27: a ServiceImport has the endpoints that the client's cluster has imported, of whatever
// network; another cluster's endpoints count only where the client's cluster has none.
func TestImportsOfClusters(t *testing.T) {
	h := New(domain, 1)
	db := serviceImport("db", object.ServiceImport{Headless: true})
	h.Update(
		in("", network("net1"), db, importedFrom("east", "db", "db-0=10.1.0.1"), importedFrom("west", "db", "=10.2.0.1")),
		in("east", network("net2"), db, importedFrom("east", "db", "db-0=10.1.0.9")),
		in("west", network("net1"), clusterIP("web", "10.96.0.1")),
	)
	own := map[string]string{"db": "10.1.0.1 10.2.0.1", "db-0.east.db": "10.1.0.1", "10-2-0-1.west.db": "10.2.0.1", "web.shop.svc.cluster.local": "10.96.0.1"}
	for claimed, want := range map[Place]map[string]string{
		{}:                                 own,
		{Network: "net9"}:                  own,
		{Cluster: "west"}:                  own,
		{Cluster: "west", Network: "net9"}: {"web.shop.svc.cluster.local": "10.96.0.1"},
		{Cluster: "east"}:                  {"db": "10.1.0.9", "db-0.east.db": "10.1.0.9", "web.shop.svc.cluster.local": "10.96.0.1"},
	} {
		got := withoutDomain(at(h, claimed))
		if web, ok := got["web"]; ok {
			got["web.shop.svc.cluster.local"] = web
			delete(got, "web")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%+v: -want +got\n%s", claimed, diff)
		}
	}
}
