package push

import (
	"math/rand/v2"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/structpb"
)

// nodeOf returns a node with metadata.
func nodeOf(tb testing.TB, id string, meta map[string]any) *corev3.Node {
	tb.Helper()
	fields, err := structpb.NewStruct(meta)
	if err != nil {
		tb.Fatal(err)
	}
	return &corev3.Node{Id: id, Metadata: fields, Cluster: "not used"}
}

// pieces returns data in buffers of a random length, as it arrives.
func pieces(data []byte) (all mem.BufferSlice) {
	for len(data) > 0 {
		n := min(len(data), 1+rand.IntN(9)) //nolint:gosec // not for security
		all, data = append(all, mem.SliceBuffer(data[:n])), data[n:]
	}
	return all
}

// decoded returns a request as the codec decodes it.
func decoded(tb testing.TB, m proto.Message) *Request {
	tb.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	_, delta := m.(*discoveryv3.DeltaDiscoveryRequest)
	r := &Request{delta: delta}
	if err := Codec().Unmarshal(pieces(data), r); err != nil {
		tb.Fatal(err)
	}
	if want := len(data) + frameHead; r.bytes != want {
		tb.Errorf("%d bytes, want %d", r.bytes, want)
	}
	return r
}

// What is used of a request is decoded, in both variants, and nothing else.
func TestRequests(t *testing.T) {
	meta := map[string]any{"NAMESPACE": "shop", "SERVICE_ACCOUNT": "web", "LABELS": map[string]any{"a": "b"}}
	kept := nodeOf(t, "id", meta)
	kept.Cluster = ""
	meta["ANNOTATIONS"], meta["PORT"] = map[string]any{"a": "b"}, 1
	node := nodeOf(t, "id", meta)
	rejection := &rpcstatus.Status{Code: 3, Message: "no"}
	for name, tt := range map[string]struct {
		m    proto.Message
		want Request
	}{
		"first": {&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL}, Request{node: kept, typeURL: TypeURL}},
		"ACK": {&discoveryv3.DiscoveryRequest{TypeUrl: TypeURL, VersionInfo: "1", ResponseNonce: "2", ResourceNames: []string{"a"}},
			Request{typeURL: TypeURL, nonce: "2", names: true}},
		"NACK": {&discoveryv3.DiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: "2", ErrorDetail: rejection},
			Request{typeURL: TypeURL, nonce: "2", rejected: true, reason: "no"}},
		"first delta": {&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL, ResourceNamesSubscribe: []string{"*"},
			InitialResourceVersions: map[string]string{"": "3", "other": "4"}}, Request{node: kept, typeURL: TypeURL, names: true, version: "3"}},
		"other versions": {&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, InitialResourceVersions: map[string]string{"other": "4"}}, Request{typeURL: TypeURL}},
		"delta NACK": {&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: "2", ErrorDetail: rejection},
			Request{typeURL: TypeURL, nonce: "2", rejected: true, reason: "no"}},
		"removed":                   {&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResourceNamesUnsubscribe: []string{"a", "", "*b"}}, Request{typeURL: TypeURL, removesTable: true}},
		"wildcard removed":          {&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResourceNamesUnsubscribe: []string{"*"}}, Request{typeURL: TypeURL, removesAll: true}},
		"rejected without a reason": {&discoveryv3.DiscoveryRequest{ErrorDetail: &rpcstatus.Status{}}, Request{rejected: true}},
		"long texts are cut": {&discoveryv3.DiscoveryRequest{TypeUrl: strings.Repeat("t", 1000), ResponseNonce: strings.Repeat("n", 1000),
			ErrorDetail: &rpcstatus.Status{Message: strings.Repeat("m", 1000)}},
			Request{typeURL: strings.Repeat("t", maxToken), nonce: strings.Repeat("n", maxToken), rejected: true, reason: strings.Repeat("m", maxForeign+1)}},
	} {
		t.Run(name, func(t *testing.T) {
			got := decoded(t, tt.m)
			tt.want.delta, tt.want.bytes = got.delta, got.bytes
			if diff := cmp.Diff(&tt.want, got, cmp.AllowUnexported(Request{}), protocmp.Transform()); diff != "" {
				t.Errorf("unexpected request (-want +got):\n%s", diff)
			}
		})
	}
}

// D61: a request is at most 64 KiB long without the names of resources, and what is kept of its node is bounded.
func TestLongRequests(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	const id = "sidecar~10.0.0.1~web-0.shop~x"
	names := make([]string, 50_000)
	many := map[string]any{}
	for i := range names {
		names[i] = "outbound|80||a.example.com"
	}
	for i := range maxLabels + 1 {
		many["l"+string(rune('a'+i))] = "x"
	}
	for name, tt := range map[string]struct {
		m    proto.Message
		want string // in the error; empty if the request is used
	}{
		"names":           {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, nil), ResourceNames: names}, ""},
		"names in delta":  {&discoveryv3.DeltaDiscoveryRequest{Node: nodeOf(t, id, nil), ResourceNamesSubscribe: names, ResourceNamesUnsubscribe: names}, ""},
		"long version":    {&discoveryv3.DiscoveryRequest{VersionInfo: long(maxUnnamed)}, "besides the names"},
		"long metadata":   {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"OTHER": long(maxUnnamed)})}, "the node has"},
		"metadata":        {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"OTHER": long(maxUnnamed - 1000)})}, ""},
		"long id":         {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id+long(maxNodeID), nil)}, "node id"},
		"namespace":       {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"NAMESPACE": long(64)})}, "is of namespace"},
		"cluster":         {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"CLUSTER_ID": long(maxName + 1)})}, "CLUSTER_ID"},
		"network":         {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"NETWORK": long(maxName + 1)})}, "NETWORK"},
		"name of a label": {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"LABELS": map[string]any{long(400): ""}})}, "LABELS"},
		"value":           {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"LABELS": map[string]any{"a": long(64)}})}, "LABELS"},
		"many labels":     {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"LABELS": many})}, "at most 256 labels"},
		"other values":    {&discoveryv3.DiscoveryRequest{Node: nodeOf(t, id, map[string]any{"NAMESPACE": map[string]any{"a": long(1000)}})}, "want a string"},
	} {
		t.Run(name, func(t *testing.T) {
			r := decoded(t, tt.m)
			err := r.err
			if err == nil && r.node != nil {
				_, err = parseNode(r.node)
			}
			if tt.want == "" && err == nil {
				return
			}
			if err == nil || tt.want == "" || status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want InvalidArgument with %q", err, tt.want)
			}
			if n := len(err.Error()); n > 1000 {
				t.Errorf("the error has %d bytes", n)
			}
		})
	}
}

// FuzzRequest decodes requests in any bytes as protobuf does, unless it refuses them.
func FuzzRequest(f *testing.F) {
	for _, m := range []proto.Message{
		&discoveryv3.DiscoveryRequest{Node: nodeOf(f, "id", map[string]any{"NAMESPACE": "shop", "PORT": 1}), TypeUrl: TypeURL, ResourceNames: []string{"a"}},
		&discoveryv3.DeltaDiscoveryRequest{Node: nodeOf(f, "id", nil), ResourceNamesUnsubscribe: []string{"*"}, InitialResourceVersions: map[string]string{"": "1"},
			ErrorDetail: &rpcstatus.Status{Message: "no"}},
	} {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, false)
		f.Add(data, true)
	}
	f.Fuzz(func(t *testing.T, data []byte, delta bool) {
		r := &Request{delta: delta}
		r.decode(pieces(data))
		sotw, incremental := new(discoveryv3.DiscoveryRequest), new(discoveryv3.DeltaDiscoveryRequest)
		var m interface {
			proto.Message
			GetTypeUrl() string
			GetResponseNonce() string
			GetErrorDetail() *rpcstatus.Status
		} = sotw
		if delta {
			m = incremental
		}
		if proto.Unmarshal(data, m) != nil || r.err != nil || len(data) > maxToken {
			return // protobuf refuses texts that are no UTF-8, and accepts groups
		}
		if r.typeURL != m.GetTypeUrl() || r.nonce != m.GetResponseNonce() || r.rejected != (m.GetErrorDetail() != nil) {
			t.Errorf("got %+v, want %v", r, m)
		}
		if r.names != (len(sotw.GetResourceNames())+len(incremental.GetResourceNamesSubscribe()) > 0) {
			t.Errorf("got %+v, want %v", r, m)
		}
	})
}
