package discovery

import (
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/clusters"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
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

const entryDefinition = "apiVersion: meta.k8s.io/v1\nkind: PartialObjectMetadata\nmetadata: {name: serviceentries.networking.istio.io}\n"

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
	t.Parallel()
	a, dir := exampleObjects(t)
	files, fromAPI := Config{ConfigDir: dir}, onAPI(t, a)
	both := fromAPI
	both.ConfigDir = dir
	for _, namespace := range []string{"shop", "data", "default"} {
		for _, asks := range []bool{false, true} {
			want := ""
			for name, cfg := range map[string]Config{"files": files, "API": fromAPI, "both": both} {
				table, errs, err := Table(t.Context(), cfg, Client{Namespace: namespace, AutoAllocate: asks})
				if err != nil || len(errs) > 0 {
					t.Fatalf("%s: %v, %v", name, err, errs)
				}
				if n := len(table.GetTable()); n < 8 {
					t.Errorf("%s: %d hosts", name, n)
				}
				got := bytesOf(t, table)
				if want == "" {
					want = got
				}
				if got != want {
					t.Errorf("%s, VIPs %t: another table from %s", namespace, asks, name)
				}
			}
		}
	}
}

// TestEditOfAPI checks that clients in both variants get what is edited at the API server.
func TestEditOfAPI(t *testing.T) { // D3, D4, D5, D14
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
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
		a.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\nspec: {clusterIP: None}\n")
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
		a.Remove(fakekube.Services, "shop/db")
		a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
		c.next()
		want("changed back", map[string]string{"web.shop.svc.cluster.local": "10.0.0.1"})
	}
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
	cfg := onAPI(t, a)
	cfg.GRPCAddr = "127.0.0.1:0"
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.inputs.readOnce() // do not let streams wait
	r := run(t, s)
	missing := "endpointslices of headless Services cannot be read: "
	wait.Until(t, "readiness says what is missing", func() bool { return strings.Contains(s.Waiting(), missing) })
	select {
	case <-s.Ready():
		t.Fatal("ready")
	default:
	}
	err = openDelta(t, r, node(t, "shop"), nil).err()
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
			"serviceentries": false, "sidecars": false, "serviceimports": false, "settings of the mesh": false,
		})
	})
	a.Refuse(fakekube.EndpointSlices, 0)
	wait.For(t, "the server is ready", s.Ready())
	if n := len(merged(t, openDelta(t, r, node(t, "shop"), nil).next().tables).GetTable()); n != 1 {
		t.Errorf("%d hosts", n)
	}
}

// TestDirectoryBeforeAPI checks that an object in the directory is used instead of the same one of
// the API server.
func TestDirectoryBeforeAPI(t *testing.T) { // D1
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("shop", "api", "10.0.0.2"))
	cfg := onAPI(t, a)
	cfg.ConfigDir = t.TempDir()
	write(t, cfg.ConfigDir, "web.yaml", svcYAML("shop", "web", "10.0.0.3"))
	r := start(t, cfg)
	c := openDelta(t, r, node(t, "shop"), nil)
	want := func(web string) {
		t.Helper()
		table := merged(t, c.next().tables).GetTable()
		got := strings.Join(table["web.shop.svc.cluster.local"].GetIps(), " ")
		if got != web || len(table["api.shop.svc.cluster.local"].GetIps()) != 1 {
			t.Errorf("%v", table)
		}
	}
	want("10.0.0.3")
	write(t, cfg.ConfigDir, "web.yaml", svcYAML("shop", "other", "10.0.0.4"))
	want("10.0.0.3") // until it is certain that the object is gone
	want("10.0.0.1")
}

// TestManyEdits checks that 3,000 edits one after the other cause few builds, and that the last one
// is served.
func TestManyEdits(t *testing.T) { // D19
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	cfg := onAPI(t, a)
	registry := prometheus.NewRegistry()
	cfg.Registerer = registry
	r := start(t, cfg)
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	before := testutil.ToFloat64(r.metrics.builds)
	began := time.Now()
	const edits = 3000
	for i := range edits {
		a.Put(fakekube.Services, svcYAML("shop", "web", fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)))
	}
	took := time.Since(began)
	last := fmt.Sprintf("10.1.%d.%d", (edits-1)/250, (edits-1)%250+1)
	pushes := 0
	for got := ""; got != last; pushes++ {
		got = c.next().tables[""].GetTable()["web.shop.svc.cluster.local"].GetIps()[0]
	}
	// The last edits may need two builds more: one has read what was there before them.
	builds := testutil.ToFloat64(r.metrics.builds) - before
	if most := float64(time.Since(began)/defaultDebounce) + 2; builds > most || float64(pushes) > builds {
		t.Errorf("%v builds and %d pushes for %d edits in %v, want at most %v", builds, pushes, edits, took, most)
	}
}

// TestChangesWhileNotReady checks that changes need no more memory, the longer a server is not ready, and that a reason
// that changes all the time does not fill the log.
func TestChangesWhileNotReady(t *testing.T) { // D43
	t.Parallel()
	a := fakekube.Start(t)
	cfg, logs := onAPI(t, a), &testlog.Buffer{}
	cfg.Logger = logs.Logger()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.addr = new(net.TCPAddr) // which the log names
	web := object.Key{Kind: object.KindService, Namespace: "shop", Name: "web"}
	from := s.inputs.all[0]
	publish := func(i int, waiting string) {
		ip := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		change := hosts.Change{Updated: []object.Object{{Key: web, Service: &object.Service{ClusterIPs: []netip.Addr{ip}}}}}
		from.Source = scripted{from.Source, source.Reading{Waiting: waiting, Read: waiting == "", Changes: []hosts.Change{change}}}
		s.publish(s.inputs.collect())
	}
	const last = 10 * maxPending
	for i := range last {
		publish(i, fmt.Sprint("a resource is forbidden, on port ", i))
	}
	if n := logs.Count("not ready, no stream is served"); n < 1 || n > 3 {
		t.Errorf("%d lines say why, want one every 5 s:\n%s", n, logs)
	}
	if n := len(from.last.Changes); n > maxPending {
		t.Errorf("%d changes wait, want at most %d", n, maxPending)
	}
	publish(last, "")
	sameAsLast := hosts.Change{Updated: []object.Object{{Key: web, Service: &object.Service{ClusterIPs: []netip.Addr{netip.MustParseAddr("10.0.3.232")}}}}}
	if u := s.push.Update([]hosts.Change{sameAsLast}, nil, func(hosts.Update, hosts.Counts) {}); len(u.Hosts) > 0 {
		t.Errorf("the Service does not have the last change's address: %+v", u.Hosts)
	}
	another := hosts.Change{Removed: []object.Key{web}}
	if u := s.push.Update([]hosts.Change{another}, nil, func(hosts.Update, hosts.Counts) {}); len(u.Hosts) != 1 {
		t.Errorf("the Service is no host: %+v", u.Hosts)
	}
}

// A scripted source has a reading that the test gives it.
type scripted struct {
	source.Source
	reading source.Reading
}

// Read returns the reading.
func (s scripted) Read() source.Reading { return s.reading }
