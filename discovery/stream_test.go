package discovery

import (
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
)

// Istio's agent forwards the subscriptions of its Envoy on the same stream. They are not
// answered, and do not affect name tables.
func TestOtherTypesAreNotAnswered(t *testing.T) {
	const clusters = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true})
	stream, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{clusters, typeURL} {
		if err := stream.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: url}); err != nil {
			t.Fatal(err)
		}
	}
	if resp, err := stream.Recv(); err != nil || resp.GetTypeUrl() != typeURL {
		t.Errorf("got %v, %v", resp, err)
	}
}

// D35: a client that takes no named tables gets an empty table as one resource without a name. Its stream ends when the server
// stops.
func TestStopEndsStreams(t *testing.T) {
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true})
	c := openDelta(t, r, node(t, "shop"), nil)
	if p := c.next(); len(p.tables) != 1 || p.tables[""] == nil || len(p.tables[""].GetTable()) != 0 {
		t.Errorf("an empty directory gives %v, want one empty table without a name", p.tables)
	}
	r.stop()
	if err := c.err(); err == nil {
		t.Error("the stream goes on")
	}
}
