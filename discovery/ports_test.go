package discovery

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// portDocuments are Services with ports of every kind, and their EndpointSlices.
var portDocuments = map[string][]string{
	fakekube.Services: {
		svc("web", `clusterIP: 10.0.0.1, ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, protocol: UDP}]`),
		svc("one", `clusterIP: 10.0.0.2, ports: [{port: 5432, targetPort: pg}]`),
		svc("none", `clusterIP: 10.0.0.3`),
		svc("long", fmt.Sprintf(`clusterIP: 10.0.0.4, ports: [{name: %s, port: 80}]`, strings.Repeat("x", 63))),
		svc("old", `type: ExternalName, externalName: web.shop.svc.cluster.local, ports: [{name: http, port: 80}]`),
		svc("db", `clusterIP: None, ports: [{name: sql, port: 5432, targetPort: 15432}]`),
		svc("mixed", `clusterIP: None, ports: [{name: http, port: 80, targetPort: web}, {name: admin, port: 81, targetPort: admin}]`),
		svc("bare", `clusterIP: None`),
	},
	fakekube.EndpointSlices: {
		portSlice("db", "db-1", "{name: sql, port: 15432}, {name: any}", "{addresses: [10.1.0.2], hostname: db-0}, {addresses: [10.1.0.1]}"),
		portSlice("db", "db-2", "{name: sql, port: 15432, protocol: TCP}", "{addresses: ['fd00::1']}"),
		portSlice("mixed", "mixed-1", "{name: http, port: 8080}, {name: admin, port: 9000}", "{addresses: [10.1.1.1]}, {addresses: [10.1.1.9], conditions: {ready: false}}"),
		portSlice("mixed", "mixed-2", "{name: http, port: 8081}", "{addresses: [10.1.1.2]}, {addresses: [10.1.1.3]}"),
		portSlice("bare", "bare-1", "", "{addresses: [10.1.2.1]}"),
	},
}

// portSlice returns an EndpointSlice with ports, with the label of a headless Service.
func portSlice(service, name, ports, endpoints string) string {
	return fmt.Sprintf("---\n{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: %s, namespace: shop, "+
		"labels: {kubernetes.io/service-name: %s, service.kubernetes.io/headless: ''}}, addressType: IPv4, ports: [%s], endpoints: [%s]}\n", name, service, ports, endpoints)
}

// portsOf formats what the entries of Services say about ports: "headless" first, then each port with
// the addresses that have it unless all have.
func portsOf(table *api.NameTable) map[string]string {
	out := map[string]string{}
	for host, info := range table.GetTable() {
		var words []string
		if info.GetHeadless() {
			words = append(words, "headless")
		}
		for _, p := range info.GetPorts() {
			text := fmt.Sprintf("%s=%d/%s", p.GetName(), p.GetNumber(), p.GetProtocol())
			if len(p.GetIps()) > 0 {
				text += "@" + strings.Join(p.GetIps(), ",")
			}
			words = append(words, text)
		}
		out[strings.TrimSuffix(host, ".shop.svc.cluster.local")] = strings.Join(words, " ")
	}
	return out
}

// onPorts returns configurations of servers that have portDocuments from files and from an API server.
func onPorts(t *testing.T) (files, fromAPI Config) {
	t.Helper()
	a, dir := fakekube.Start(t), t.TempDir()
	for resource, documents := range portDocuments {
		write(t, dir, filepath.Base(resource)+".yaml", strings.Join(documents, ""))
		for _, document := range documents {
			a.Put(resource, strings.TrimPrefix(document, "---\n"))
		}
	}
	return Config{ConfigDir: dir}, onAPI(t, a)
}

// TestPorts checks that the entries of Services have their ports, and entries of headless Services
// the ports of their endpoints, from files as from the API server.
func TestPorts(t *testing.T) { // D1, D21, D22
	files, fromAPI := onPorts(t)
	for name, cfg := range map[string]Config{"files": files, "API": fromAPI} {
		t.Run(name, func(t *testing.T) {
			table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop"})
			if err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			want := map[string]string{
				"web":     "dns=53/UDP http=80/",
				"one":     "=5432/",
				"none":    "",
				"long":    "=80/", // no DNS name can have its name
				"old":     "",     // an alias
				"db":      "headless sql=15432/",
				"db-0.db": "",
				"mixed":   "headless admin=9000/@10.1.1.1 http=8080/@10.1.1.1 http=8081/@10.1.1.2,10.1.1.3",
				"bare":    "headless",
			}
			if diff := cmp.Diff(want, portsOf(table)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestPortsOfPods checks the ports of a headless Service without slices: the number of a targetPort
// counts, and a name does not, because only containers have its number.
func TestPortsOfPods(t *testing.T) { // D22
	table := tableIn(t, allOf(parse(t, svc("db", "clusterIP: None, selector: {app: db}, "+
		"ports: [{name: sql, port: 5432, targetPort: 15432}, {name: http, port: 80}, {name: admin, port: 81, targetPort: admin}]")+
		podDoc("db-0", "", "", "podIP: 10.1.0.1, "+ready))), hosts.View{Namespace: "shop", Families: bothFamilies})
	if got, want := portsOf(table)["db"], "headless http=80/ sql=15432/"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPortsOfFamily checks that a client with one family gets the ports of endpoints of that family.
func TestPortsOfFamily(t *testing.T) { // D22
	all := allOf(parse(t, svc("db", "clusterIP: None")+
		portSlice("db", "four", "{name: sql, port: 5432}", "{addresses: [10.1.0.1]}, {addresses: [10.1.0.2]}")+
		portSlice("db", "more", "{name: sql, port: 5432}, {name: http, port: 80}", "{addresses: [10.1.0.3]}")+
		portSlice("db", "same", "{name: http, port: 80}", "{addresses: [10.1.0.1]}")+
		portSlice("db", "six", "{name: six, port: 6666}", "{addresses: ['fd00::1']}")))
	for families, want := range map[hosts.Families]string{
		{V4: true}: "headless http=80/@10.1.0.1,10.1.0.3 sql=5432/", {V6: true}: "headless six=6666/",
	} {
		if got := portsOf(tableIn(t, all, hosts.View{Namespace: "shop", Families: families}))["db"]; got != want {
			t.Errorf("a client with %+v gets %q, want %q", families, got, want)
		}
	}
}
