package discovery

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
)

var bothFamilies = hosts.Families{V4: true, V6: true}

// tableOf builds the unnamed table of a view from YAML documents. Automatic VIPs are
// shown as "vip4" and "vip6".
func tableOf(t *testing.T, yaml string, of hosts.View) map[string]string {
	t.Helper()
	return show(tableIn(t, allOf(parse(t, yaml)), of))
}

// read returns the objects in a file of a directory, and the errors in them.
func read(t *testing.T, yaml string) (objects []object.Object, errs []object.Error) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, "f.yaml", yaml)
	in, err := newInputs(Config{ConfigDir: dir, AllowEmpty: true}.withDefaults(), func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	errs, err = in.readAll(t.Context(), func(changes ...hosts.Change) hosts.Update {
		for _, c := range changes {
			objects = append(objects, c.Updated...)
		}
		return hosts.Update{}
	})
	if err != nil {
		t.Fatal(err)
	}
	return objects, errs
}

// parse returns the objects in a file.
func parse(t *testing.T, yaml string) []object.Object {
	t.Helper()
	objects, errs := read(t, yaml)
	if len(errs) > 0 {
		t.Fatalf("errors: %v", errs)
	}
	return objects
}

// allOf returns the hosts of objects.
func allOf(objects []object.Object) *hosts.Hosts {
	all := hosts.New(defaultClusterDomain, 1)
	all.Update(hosts.Change{Updated: objects})
	return all
}

// tableIn returns the table of a view.
func tableIn(t *testing.T, all *hosts.Hosts, of hosts.View) *api.NameTable {
	t.Helper()
	out, encoded := new(api.NameTable), push.Encode(all, of)
	if err := proto.Unmarshal(encoded, out); err != nil {
		t.Fatal(err)
	}
	entries := func(table []byte) (all []string) {
		for len(table) > 0 {
			_, _, n := protowire.ConsumeField(table)
			all, table = append(all, string(table[:n])), table[n:]
		}
		slices.Sort(all)
		return all
	}
	if again := bytesOf(t, out); !slices.Equal(entries([]byte(again)), entries(encoded)) {
		t.Error("protobuf's own encoding of some entry differs")
	}
	return out
}

// show renders a table for comparison: registry, shortname.namespace, addresses.
func show(table *api.NameTable) map[string]string {
	out := map[string]string{}
	for host, info := range table.GetTable() {
		var ips []string
		for _, ip := range info.GetIps() {
			if a := netip.MustParseAddr(ip); object.IsVIP(a) && a.Is4() {
				ip = "vip4"
			} else if object.IsVIP(a) {
				ip = "vip6"
			}
			ips = append(ips, ip)
		}
		s := info.GetRegistry()
		if info.GetShortname() != "" || info.GetNamespace() != "" {
			s += " " + info.GetShortname() + "." + info.GetNamespace()
		}
		out[host] = s + " " + strings.Join(ips, " ")
	}
	return out
}

// svc, slice, entry and podDoc return objects as YAML documents; spec is flow YAML.
func svc(name, spec string) string {
	return fmt.Sprintf("---\n{apiVersion: v1, kind: Service, metadata: {name: %s, namespace: shop}, spec: {%s}}\n", name, spec)
}

func slice(service, name, endpoints string) string {
	return fmt.Sprintf("---\n{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: %s, namespace: shop, labels: {kubernetes.io/service-name: %s}}, endpoints: [%s]}\n",
		name, service, endpoints)
}

func entry(name, spec string) string { return entryIn("shop", name, spec) }

func entryIn(namespace, name, spec string) string {
	return fmt.Sprintf("---\n{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: %s, namespace: %s}, spec: {%s}}\n", name, namespace, spec)
}

func podDoc(name, meta, spec, status string) string {
	return fmt.Sprintf("---\n{apiVersion: v1, kind: Pod, metadata: {name: %s, namespace: shop, labels: {app: db}%s}, spec: {%s}, status: {%s}}\n",
		name, meta, spec, status)
}

const (
	ready    = "conditions: [{type: Ready, status: 'True'}]"
	notReady = "conditions: [{type: Ready, status: 'False'}]"
)

// N2, N3, N11, D67: the hosts of each kind of object. A Service is in the table without an address, too; a host of
// ServiceEntries is not.
func TestClaims(t *testing.T) {
	type table = map[string]string
	for _, tt := range []struct {
		name, yaml string
		want       table
	}{
		{"ClusterIP", svc("web", "clusterIP: 10.0.0.1"), table{"web.shop.svc.cluster.local": "Kubernetes web.shop 10.0.0.1"}},
		{"NodePort and LoadBalancer", svc("a", "type: NodePort, clusterIP: 10.0.0.1") + svc("b", "type: LoadBalancer, clusterIP: 10.0.0.2"),
			table{"a.shop.svc.cluster.local": "Kubernetes a.shop 10.0.0.1", "b.shop.svc.cluster.local": "Kubernetes b.shop 10.0.0.2"}},
		{"dual stack", svc("web", "clusterIP: 10.0.0.1, clusterIPs: [10.0.0.1, 'fd00::1']"),
			table{"web.shop.svc.cluster.local": "Kubernetes web.shop 10.0.0.1 fd00::1"}},
		{"ExternalName", svc("web", "type: ExternalName, externalName: a.example.com"), table{"web.shop.svc.cluster.local": "Kubernetes web.shop "}},
		{"unallocated", svc("web", "selector: {app: web}"), table{"web.shop.svc.cluster.local": "Kubernetes web.shop "}},
		{"headless without endpoints", svc("db", "clusterIP: None, selector: {app: db}"), table{"db.shop.svc.cluster.local": "Kubernetes db.shop "}},
		{"headless with a slice", svc("db", "clusterIP: None") + slice("db", "s1",
			"{addresses: [10.1.0.2]}, {addresses: [10.1.0.1], conditions: {ready: true}}, {addresses: [10.1.0.3], conditions: {ready: false}}"),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.1 10.1.0.2"}},
		{"headless that publishes endpoints that are not ready", svc("db", "clusterIP: None, publishNotReadyAddresses: true") +
			slice("db", "s1", "{addresses: [10.1.0.3], conditions: {ready: false}}"),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.3"}},
		{"several slices, the same address twice", svc("db", "clusterIP: None") + slice("db", "s1", "{addresses: [10.1.0.2]}") +
			slice("db", "s2", "{addresses: [10.1.0.2]}, {addresses: ['fd00::2']}"),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.2 fd00::2"}},
		{"slice of another Service", svc("db", "clusterIP: None") + slice("other", "s1", "{addresses: [10.1.0.2]}"), table{"db.shop.svc.cluster.local": "Kubernetes db.shop "}},
		{"StatefulSet by slice", svc("db", "clusterIP: None") + slice("db", "s1", "{addresses: [10.1.0.1], hostname: db-0}") +
			slice("db", "s2", "{addresses: ['fd00::1'], hostname: db-0}"),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.1 fd00::1",
				"db-0.db.shop.svc.cluster.local": "Kubernetes db-0.db.shop 10.1.0.1 fd00::1"}},
		{"StatefulSet by targetRef", svc("db", "clusterIP: None") +
			slice("db", "s1", "{addresses: [10.1.0.1], targetRef: {kind: Pod, name: db-0}}, {addresses: [10.1.0.2], targetRef: {kind: Pod, name: lone}}, {addresses: [10.1.0.3], targetRef: {kind: VM, name: db-0}}") +
			podDoc("db-0", "", "hostname: db-0, subdomain: db", ready) + podDoc("lone", "", "hostname: lone, subdomain: other", ready),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.1 10.1.0.2 10.1.0.3",
				"db-0.db.shop.svc.cluster.local": "Kubernetes db-0.db.shop 10.1.0.1"}},
		{"headless from Pods", svc("db", "clusterIP: None, selector: {app: db}") +
			podDoc("db-0", "", "hostname: db-0, subdomain: db", "podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}, {ip: 'fd00::1'}], "+ready) +
			podDoc("db-1", "", "hostname: db-1, subdomain: db", "podIP: 10.1.0.2, "+notReady) +
			podDoc("db-2", ", deletionTimestamp: 2026-01-01T00:00:00Z", "", "podIP: 10.1.0.3, "+ready) +
			podDoc("db-3", "", "", "phase: Succeeded, podIP: 10.1.0.4, "+ready),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.1 fd00::1",
				"db-0.db.shop.svc.cluster.local": "Kubernetes db-0.db.shop 10.1.0.1 fd00::1"}},
		{"slices take precedence over Pods", svc("db", "clusterIP: None, selector: {app: db}") + slice("db", "s1", "{addresses: [10.1.0.9]}") +
			podDoc("db-0", "", "", "podIP: 10.1.0.1, "+ready),
			table{"db.shop.svc.cluster.local": "Kubernetes db.shop 10.1.0.9"}},
		{"selector that selects no Pod", svc("db", "clusterIP: None, selector: {app: x}") + podDoc("db-0", "", "", "podIP: 10.1.0.1, "+ready), table{"db.shop.svc.cluster.local": "Kubernetes db.shop "}},
		{"FQDN slice", svc("db", "clusterIP: None") + strings.Replace(slice("db", "s1", "{addresses: [a.example.com]}"),
			"endpoints:", "addressType: FQDN, endpoints:", 1), table{"db.shop.svc.cluster.local": "Kubernetes db.shop "}},

		{"ServiceEntry with addresses", entry("e", "hosts: [a.example.com, '*.b.example.com', UPPER.example.com.], addresses: [192.0.2.1, '2001:db8::1']"),
			table{"a.example.com": "External 192.0.2.1 2001:db8::1", "*.b.example.com": "External 192.0.2.1 2001:db8::1",
				"UPPER.example.com": "External 192.0.2.1 2001:db8::1"}},
		{"CIDR of one address", entry("e", "hosts: [cidr.example.com], addresses: [192.0.2.33/32, 192.0.2.64/26, '2001:db8::/64', '2001:db8::7/128']"),
			table{"cidr.example.com": "External 192.0.2.33 2001:db8::7"}},
		{"CIDRs only", entry("e", "hosts: [a.example.com], addresses: [192.0.2.0/24], resolution: DNS"), table{}},
		{"automatic VIP", entry("e", "hosts: [a.example.com], resolution: DNS"), table{"a.example.com": "External vip4 vip6"}},
		{"endpoints are not answered", entry("e", "hosts: [vm.example.com], resolution: STATIC, endpoints: [{address: 10.9.9.9}]"),
			table{"vm.example.com": "External vip4 vip6"}},
		{"DNS_ROUND_ROBIN", entry("e", "hosts: [a.example.com], resolution: DNS_ROUND_ROBIN"), table{"a.example.com": "External vip4 vip6"}},
		{"NONE gets no VIP", entry("e", "hosts: [a.example.com], resolution: NONE") + entry("f", "hosts: [b.example.com]"), table{}},
		{"a wildcard gets no VIP", entry("e", "hosts: ['*.a.example.com'], resolution: DNS"), table{}},
		{"a DYNAMIC_DNS wildcard gets a VIP", entry("e", "hosts: ['*.a.example.com'], resolution: DYNAMIC_DNS"), table{"*.a.example.com": "External vip4 vip6"}},
		{"opted out", strings.Replace(entry("e", "hosts: [a.example.com], resolution: DNS"), "namespace: shop",
			"namespace: shop, labels: {networking.istio.io/enable-autoallocate-ip: 'False'}", 1), table{}},
		{"one host, several objects", entry("e", "hosts: [a.example.com], addresses: [192.0.2.2]") +
			entry("h", "hosts: [A.example.com], addresses: [192.0.2.3, 192.0.2.2]") + entryIn("data", "f", "hosts: [A.example.com], addresses: [192.0.2.1, 192.0.2.2]") + entry("g", "hosts: [a.example.com], resolution: DNS"),
			table{"A.example.com": "External 192.0.2.2 192.0.2.3"}},
		{"addresses to which nobody can connect", entry("e", "hosts: [a.example.com], addresses: [0.0.0.0, '::', 0.0.0.0/32, 224.0.0.1, 192.0.2.1]") +
			entry("f", "hosts: [b.example.com], addresses: [0.0.0.0]"), table{"a.example.com": "External 192.0.2.1"}},
		{"NONE with Pods", entry("e", "hosts: [a.example.com], ports: [{number: 80, name: http}], resolution: NONE, workloadSelector: {labels: {app: db}}") +
			podDoc("db-0", "", "", "podIP: 10.1.0.1, "+ready) + podDoc("db-1", "", "", "podIP: 10.1.0.2, "+notReady),
			table{"a.example.com": "External 10.1.0.1"}},
		{"a Service takes precedence over a ServiceEntry", svc("web", "clusterIP: 10.0.0.1") + entry("e", "hosts: [web.shop.svc.cluster.local], addresses: [192.0.2.1]"),
			table{"web.shop.svc.cluster.local": "Kubernetes web.shop 10.0.0.1"}},
		{"a ServiceEntry for a Service gets no VIP", svc("web", "clusterIP: None") + entry("e", "hosts: [web.shop.svc.cluster.local], resolution: DNS"),
			table{"web.shop.svc.cluster.local": "Kubernetes web.shop "}},
		{"a remote cluster's service", entry("e", "hosts: [web.shop.svc.clusterset.local], addresses: [10.97.0.1]"),
			table{"web.shop.svc.clusterset.local": "External 10.97.0.1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tableOf(t, tt.yaml, hosts.View{Namespace: "shop", Families: bothFamilies, VIPs: true})
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestFamiliesAndCapture(t *testing.T) {
	yaml := svc("four", "clusterIP: 10.0.0.1") + svc("six", "clusterIP: 'fd00::1'") + svc("dual", "clusterIPs: [10.0.0.2, 'fd00::2']") +
		svc("db", "clusterIP: None") + slice("db", "s", "{addresses: [10.1.0.1], hostname: db-0}") +
		entry("e", "hosts: [vip.example.com], resolution: DNS") + entry("f", "hosts: [a.example.com], addresses: [192.0.2.1]")
	const suffix = ".shop.svc.cluster.local"
	for _, tt := range []struct {
		name string
		of   hosts.View
		want map[string]string
	}{
		{"IPv4", hosts.View{Families: hosts.Families{V4: true}, VIPs: true}, map[string]string{
			"four" + suffix: "Kubernetes four.shop 10.0.0.1", "six" + suffix: "Kubernetes six.shop ", "dual" + suffix: "Kubernetes dual.shop 10.0.0.2",
			"db" + suffix: "Kubernetes db.shop 10.1.0.1", "db-0.db" + suffix: "Kubernetes db-0.db.shop 10.1.0.1",
			"vip.example.com": "External vip4", "a.example.com": "External 192.0.2.1"}},
		{"IPv6", hosts.View{Families: hosts.Families{V6: true}, VIPs: true}, map[string]string{
			"four" + suffix: "Kubernetes four.shop ", "db" + suffix: "Kubernetes db.shop ", "db-0.db" + suffix: "Kubernetes db-0.db.shop ",
			"six" + suffix: "Kubernetes six.shop fd00::1", "dual" + suffix: "Kubernetes dual.shop fd00::2",
			"vip.example.com": "External vip6", "a.example.com": "External 192.0.2.1"}},
		{"does not ask for VIPs", hosts.View{Families: hosts.Families{V6: true}}, map[string]string{
			"four" + suffix: "Kubernetes four.shop ", "db" + suffix: "Kubernetes db.shop ", "db-0.db" + suffix: "Kubernetes db-0.db.shop ",
			"six" + suffix: "Kubernetes six.shop fd00::1", "dual" + suffix: "Kubernetes dual.shop fd00::2",
			"a.example.com": "External 192.0.2.1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.of.Namespace = "shop"
			if diff := cmp.Diff(tt.want, tableOf(t, yaml, tt.of)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestExportTo(t *testing.T) { // D11
	annotated := func(scope string) string {
		return strings.Replace(svc("web", "clusterIP: 10.0.0.1"), "namespace: shop",
			"namespace: shop, annotations: {networking.istio.io/exportTo: '"+scope+"'}", 1)
	}
	for _, tt := range []struct {
		yaml string
		sees string // of the namespaces shop, data and other
	}{
		{svc("web", "clusterIP: 10.0.0.1"), "shop data other"},
		{annotated("*"), "shop data other"},
		{annotated(""), "shop data other"},
		{annotated("."), "shop"},
		{annotated("., data"), "shop data"},
		{annotated("data"), "data"},
		{annotated("~"), ""},
		{annotated(","), ""},
		{annotated("data,~"), ""},
		{annotated("~,*"), "shop data other"},
		{entry("e", "hosts: [a.b], addresses: [192.0.2.1]"), "shop data other"},
		{entry("e", "hosts: [a.b], addresses: [192.0.2.1], exportTo: ['*']"), "shop data other"},
		{entry("e", "hosts: [a.b], addresses: [192.0.2.1], exportTo: ['.']"), "shop"},
		{entry("e", "hosts: [a.b], addresses: [192.0.2.1], exportTo: [data, other]"), "data other"},
		{entry("e", "hosts: [a.b], addresses: [192.0.2.1], exportTo: ['~']"), ""},
	} {
		var sees []string
		for _, namespace := range []string{"shop", "data", "other"} {
			if len(tableOf(t, tt.yaml, hosts.View{Namespace: namespace, Families: bothFamilies})) > 0 {
				sees = append(sees, namespace)
			}
		}
		if got := strings.Join(sees, " "); got != tt.sees {
			t.Errorf("%s: seen by %q, want %q", tt.yaml, got, tt.sees)
		}
	}
}
