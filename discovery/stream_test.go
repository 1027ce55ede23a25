package discovery

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protojson"
)

// Istio's agent forwards the subscriptions of its Envoy on the same stream. They are not
// answered, and do not affect name tables.
func TestOtherTypesAreNotAnswered(t *testing.T) {
	t.Parallel()
	const clusters = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("a", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir})

	sotw, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{clusters, typeURL} {
		if err := sotw.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: url}); err != nil {
			t.Fatal(err)
		}
	}
	if resp, err := sotw.Recv(); err != nil || resp.GetTypeUrl() != typeURL {
		t.Errorf("sotw: got %v, %v", resp, err)
	}

	delta, err := r.dial(t).DeltaAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{clusters, typeURL} {
		if err := delta.Send(&discoveryv3.DeltaDiscoveryRequest{Node: node(t, "shop"), TypeUrl: url}); err != nil {
			t.Fatal(err)
		}
	}
	if resp, err := delta.Recv(); err != nil || resp.GetTypeUrl() != typeURL {
		t.Errorf("delta: got %v, %v", resp, err)
	}
}

// A client gets its table whatever it subscribes to, as from istiod.
func TestSubscribedNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, namespace := range []string{"a", "b", "c"} {
		write(t, dir, namespace+".yaml", svcYAML(namespace, "x", "10.0.0.1"))
	}
	r := start(t, Config{ConfigDir: dir})
	for _, tt := range []struct {
		names []string
	}{
		{nil}, {[]string{"*"}}, {[]string{"a", "c"}},
	} {
		c := openSotw(t, r, node(t, "a"), tt.names...)
		if p := c.next(); len(p.tables) != 1 || len(merged(t, p.tables).GetTable()) != 3 {
			t.Errorf("names %v: %v, want one table of 3 hosts", tt.names, p.tables)
		}
		c.quiet()
	}
}

// Each client has its own view. An edit is sent only to clients that see it.
func TestEditIsSentOnlyToItsViews(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	private := func(ip string) string {
		return entry("e", "hosts: [a.example.com], addresses: ["+ip+"], exportTo: ['.']")
	}
	write(t, dir, "a.yaml", private("192.0.2.1"))
	r := start(t, Config{ConfigDir: dir})
	shop, data := openSotw(t, r, node(t, "shop")), openDelta(t, r, node(t, "data"), nil)
	shop.next()
	data.next()
	shop.quiet() // both acknowledgements are in
	write(t, dir, "a.yaml", private("192.0.2.2"))
	if got := fmt.Sprint(ipsOf(t, shop.next().tables["0"])); got != "map[a.example.com:192.0.2.2]" {
		t.Errorf("got %s", got)
	}
	data.quiet()
	if got := len(merged(t, data.state()).GetTable()); got != 0 {
		t.Errorf("data sees %d hosts, want none", got)
	}
}

// Streams end when the server stops, and a client resumes with the next server.
func TestStopEndsStreams(t *testing.T) {
	t.Parallel()
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	r.stop()
	if err := c.err(); err == nil {
		t.Error("the stream goes on")
	}
}

// Istio's agent gets one table, in both variants.
func TestTableOfIstioAgent(t *testing.T) { // D35
	t.Parallel()
	data, err := os.ReadFile(filepath.Join("testdata", "istiod", "agent-node.json"))
	if err != nil {
		t.Fatal(err)
	}
	var n corev3.Node
	if err := protojson.Unmarshal(data, &n); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("a", "clusterIP: 10.0.0.1")+svcYAML("b", "b", "10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	for _, variant := range []string{variantSotw, variantDelta} {
		p := open(t, variant, r, &n).next()
		if len(p.tables) != 1 {
			t.Errorf("%s: %d resources, want 1", variant, len(p.tables))
		}
		for _, table := range p.tables {
			if len(table.GetTable()) != 2 {
				t.Errorf("%s: %v", variant, table)
			}
		}
	}
}
