package push

import (
	"maps"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// D61: what is kept of a node is bounded.
func TestLongNodes(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	const id = "sidecar~10.0.0.1~web-0.shop~x"
	many := map[string]any{}
	for i := range maxLabels + 1 {
		many["l"+string(rune('a'+i))] = "x"
	}
	for name, tt := range map[string]struct {
		node *corev3.Node
		want string // in the error
	}{
		"long id":         {nodeOf(t, id+long(maxNodeID), nil), "node id"},
		"namespace":       {nodeOf(t, id, map[string]any{"NAMESPACE": long(64)}), "is of namespace"},
		"cluster":         {nodeOf(t, id, map[string]any{"CLUSTER_ID": long(maxName + 1)}), "CLUSTER_ID"},
		"network":         {nodeOf(t, id, map[string]any{"NETWORK": long(maxName + 1)}), "NETWORK"},
		"name of a label": {nodeOf(t, id, map[string]any{"LABELS": map[string]any{long(400): ""}}), "LABELS"},
		"value":           {nodeOf(t, id, map[string]any{"LABELS": map[string]any{"a": long(64)}}), "LABELS"},
		"many labels":     {nodeOf(t, id, map[string]any{"LABELS": many}), "at most 256 labels"},
		"other values":    {nodeOf(t, id, map[string]any{"NAMESPACE": map[string]any{"a": long(1000)}}), "want a string"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseNode(tt.node)
			if err == nil || status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want InvalidArgument with %q", err, tt.want)
			}
			if n := len(err.Error()); n > 1000 {
				t.Errorf("the error has %d bytes", n)
			}
		})
	}
}

// FuzzRequest decodes what is used of requests in any bytes as protobuf does, unless one of the two refuses them.
func FuzzRequest(f *testing.F) {
	data, err := proto.Marshal(&discoveryv3.DeltaDiscoveryRequest{
		Node: nodeOf(f, "id", map[string]any{"NAMESPACE": "shop"}), TypeUrl: TypeURL, ResourceNamesSubscribe: []string{"*"},
		InitialResourceVersions: map[string]string{"": "1", "7": "nt:AAAAAAAAAAA"}, ErrorDetail: &rpcstatus.Status{Message: "no"},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data, true)
	f.Fuzz(func(t *testing.T, data []byte, delta bool) {
		want, r, versions := new(discoveryv3.DeltaDiscoveryRequest), newRequest(delta), map[string]string{}
		if r.decode(data) != nil || !delta || proto.Unmarshal(data, want) != nil {
			return
		}
		for _, one := range r.versions {
			versions[string(one[0])] = string(one[1])
		}
		if want.GetNode() != nil {
			want.Node.Extensions = nil
			want.Node.ProtoReflect().SetUnknown(nil) // an extension of another type
			r.node.ProtoReflect().SetUnknown(nil)
		}
		if want.GetTypeUrl() != TypeURL {
			want.InitialResourceVersions = nil
		}
		if r.used > maxUsed {
			return
		}
		if r.bytes != len(data)+frameHead || r.nonce != want.GetResponseNonce() || !proto.Equal(r.node, want.GetNode()) || !maps.Equal(versions, want.GetInitialResourceVersions()) {
			t.Errorf("got %+v want %v", r, want)
		}
		announced(r.versions, nil)
	})
}
