package discovery

import (
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/clusters"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// onAPI returns the configuration of a server that reads an API server.
func onAPI(t *testing.T, a *fakekube.API) Config {
	t.Helper()
	access, err := clusters.Open(a.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	return Config{Kubernetes: access}
}

const entryDefinition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: serviceentries.networking.istio.io}\n"

// exampleObjects returns an API server and a directory with the same objects: the examples without
// Pods, whose hostnames are in the EndpointSlices that an API server has.
func exampleObjects(t *testing.T) (a *fakekube.API, dir string) {
	t.Helper()
	a, dir = fakekube.Start(t), t.TempDir()
	a.Put(fakekube.Definitions, entryDefinition)
	resources := map[string]string{
		"Service": fakekube.Services, "EndpointSlice": fakekube.EndpointSlices, "ServiceEntry": fakekube.ServiceEntries,
	}
	err := fs.WalkDir(examples.Files, ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".yaml") {
			return err
		}
		text, err := fs.ReadFile(examples.Files, path)
		for i, document := range strings.Split("\n"+string(text), "\n---") {
			_, after, _ := strings.Cut(document, "\nkind: ")
			kind, _, _ := strings.Cut(after, "\n")
			if resource, ok := resources[kind]; ok {
				a.Put(resource, document)
				write(t, dir, fmt.Sprintf("%s-%d.yaml", strings.ReplaceAll(path, "/", "-"), i), document)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return a, dir
}

// TestSameTableFromAPI checks that the same objects give the same table, byte for byte, from files,
// from the API server, and from both.
func TestSameTableFromAPI(t *testing.T) { // D1
	a, dir := exampleObjects(t)
	files, fromAPI := Config{ConfigDir: dir}, onAPI(t, a)
	both := fromAPI
	both.ConfigDir = dir
	want := ""
	for name, cfg := range map[string]Config{"files": files, "API": fromAPI, "both": both} {
		table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop", AutoAllocate: true})
		if err != nil || len(errs) > 0 || len(table.GetTable()) < 8 {
			t.Fatalf("%s: %v, %v, %v", name, table, err, errs)
		}
		got := bytesOf(t, table)
		if want == "" {
			want = got
		}
		if got != want {
			t.Errorf("another table from %s", name)
		}
	}
}

// TestEditOfAPI checks that clients in both variants get what is edited at the API server.
func TestEditOfAPI(t *testing.T) { // D3, D4, D5, D14
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("shop", "db", "None"))
	r := start(t, onAPI(t, a))
	for _, variant := range []string{variantSotw, variantDelta} {
		c := open(t, variant, r, node(t, "shop"))
		want := func(what string, hosts map[string]string) {
			t.Helper()
			table := merged(t, c.state())
			for host, ips := range hosts {
				if got := strings.Join(table.GetTable()[host].GetIps(), " "); got != ips {
					t.Errorf("%s, %s: %s has the addresses %q, want %q", variant, what, host, got, ips)
				}
			}
		}
		c.next()
		want("first", map[string]string{"web.shop.svc.cluster.local": "10.0.0.1", "api.example.com": ""})
		a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
		c.next()
		want("changed", map[string]string{"web.shop.svc.cluster.local": "10.0.0.2"})
		a.Put(fakekube.EndpointSlices, sliceYAML("10.1.0.1", true))
		c.next()
		want("headless", map[string]string{"db.shop.svc.cluster.local": "10.1.0.1", "db-0.db.shop.svc.cluster.local": "10.1.0.1"})
		a.Put(fakekube.EndpointSlices, sliceYAML("10.1.0.1", false))
		c.next()
		want("not ready", map[string]string{"db.shop.svc.cluster.local": ""})
		a.Put(fakekube.Definitions, entryDefinition)
		a.Put(fakekube.ServiceEntries, entryYAML("api", "shop", "hosts: [api.example.com]", "addresses: [192.0.2.1]", "resolution: DNS"))
		c.next()
		want("installed later", map[string]string{"api.example.com": "192.0.2.1"})
		a.Remove(fakekube.ServiceEntries, "shop/api")
		c.next()
		want("deleted", map[string]string{"api.example.com": ""})
		a.Remove(fakekube.Definitions, "/serviceentries.networking.istio.io")
		a.Remove(fakekube.EndpointSlices, "shop/db-0")
		a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
		c.next()
		want("changed back", map[string]string{"web.shop.svc.cluster.local": "10.0.0.1"})
	}
}

// TestProxyMetadata checks that injection gets the variables in the mesh config before the server is ready, and changes.
func TestProxyMetadata(t *testing.T) { // I12
	t.Parallel()
	a := fakekube.Start(t)
	put := func(value string) {
		a.Put(fakekube.ConfigMaps, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\n"+
			"data: {mesh: 'defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: %q}}'}\n", value))
	}
	put("true")
	s := start(t, onAPI(t, a))
	wait.For(t, "the server is ready", s.Ready())
	if got := s.ProxyMetadata()["ISTIO_META_DNS_CAPTURE"]; got != "true" {
		t.Errorf("at the start: %q", got)
	}
	put("false")
	wait.Until(t, "the change is known", func() bool { return s.ProxyMetadata()["ISTIO_META_DNS_CAPTURE"] == "false" })
}

func sliceYAML(ip string, ready bool) string {
	return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
		"metadata: {name: db-0, namespace: shop, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ''}}\n"+
		"endpoints: [{addresses: [%s], hostname: db-0, conditions: {ready: %t}}]\n", ip, ready)
}

func entryYAML(name, namespace string, spec ...string) string {
	return fmt.Sprintf("apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: %s, namespace: %s}\nspec: {%s}\n",
		name, namespace, strings.Join(spec, ", "))
}

// TestNoPartialTable checks that no table is served before everything has been read, and that
// readiness and the refusal of a stream say what is missing.
func TestNoPartialTable(t *testing.T) { // D17, D43
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Refuse(fakekube.EndpointSlices, http.StatusForbidden)
	s := startUnready(t, onAPI(t, a))
	missing := "endpointslices of headless Services cannot be read: "
	wait.Until(t, "readiness says what is missing", func() bool { return strings.Contains(s.Waiting(), missing) })
	if chans.Closed(s.Ready()) {
		t.Fatal("ready")
	}
	s.inputs.readOnce() // do not let streams wait
	err := openDelta(t, s, node(t, "shop"), nil).err()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), missing) {
		t.Errorf("a stream ended with %v", err)
	}
	wait.Until(t, "both readers of the resource fail, and no others", func() bool {
		failing := map[string]bool{}
		for _, resource := range s.Resources() {
			failing[resource.Resource] = resource.Failure != ""
		}
		return maps.Equal(failing, map[string]bool{
			"services": false, "endpointslices of headless Services": true, "endpointslices of other controllers": true,
			"serviceentries": false, "sidecars": false, "serviceimports": false, "settings of the mesh": false, "namespace kube-system": false,
		})
	})
	a.Refuse(fakekube.EndpointSlices, 0)
	wait.For(t, "the server is ready", s.Ready())
	if n := len(merged(t, openDelta(t, s, node(t, "shop"), nil).next().tables).GetTable()); n != 1 {
		t.Errorf("%d hosts", n)
	}
}

// TestDirectoryBeforeAPI checks that an object in the directory is used instead of the same one of
// the API server.
func TestDirectoryBeforeAPI(t *testing.T) { // D1
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("shop", "api", "10.0.0.2"))
	cfg := onAPI(t, a)
	cfg.ConfigDir = t.TempDir()
	write(t, cfg.ConfigDir, "web.yaml", svcYAML("shop", "web", "10.0.0.3"))
	table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop"})
	if err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	want := map[string]string{"web.shop.svc.cluster.local": "10.0.0.3", "api.shop.svc.cluster.local": "10.0.0.2"}
	if diff := cmp.Diff(want, ipsOf(t, table)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
