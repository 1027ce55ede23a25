package push

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/discovery/hosts"
)

func TestParseNode(t *testing.T) {
	v4, v6, both := hosts.Families{V4: true}, hosts.Families{V6: true}, hosts.Families{V4: true, V6: true}
	for _, tt := range []struct {
		name, id string
		meta     map[string]any
		want     hosts.View
	}{
		{"id alone", "sidecar~10.0.0.1~web-0.shop~shop.svc.cluster.local", nil, hosts.View{Namespace: "shop", Families: v4}},
		{"pod with dots", "sidecar~10.0.0.1~a.b.c.shop~x", nil, hosts.View{Namespace: "shop", Families: v4}},
		{"metadata takes precedence over the id", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"NAMESPACE": "data", "INSTANCE_IPS": ""},
			hosts.View{Namespace: "data", Families: v4}},
		{"IPv6", "sidecar~fd00::1~web-0.shop~x", nil, hosts.View{Namespace: "shop", Families: v6}},
		{"dual", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"INSTANCE_IPS": "10.0.0.1, fd00::1"}, hosts.View{Namespace: "shop", Families: both}},
		{"link-local is ignored", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"INSTANCE_IPS": "10.0.0.1,fe80::1,::1"}, hosts.View{Namespace: "shop", Families: v4}},
		{"mapped", "sidecar~::ffff:10.0.0.1~web-0.shop~x", nil, hosts.View{Namespace: "shop", Families: v4}},
		{"unknown families", "sidecar~0.0.0.0~web-0.shop~x", nil, hosts.View{Namespace: "shop", Families: both}},
		{"loopback", "sidecar~127.0.0.1~web-0.shop~x", nil, hosts.View{Namespace: "shop", Families: both}},
		{"asks for VIPs", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_AUTO_ALLOCATE": "true"}, hosts.View{Namespace: "shop", Families: v4, VIPs: true}},
		{"asks and does not capture", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "false", "DNS_AUTO_ALLOCATE": "true"}, hosts.View{Namespace: "shop", Families: v4}},
		{"captures and does not ask", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "true"}, hosts.View{Namespace: "shop", Families: v4}},
		{"switches", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "false", "DNS_AUTO_ALLOCATE": "false"}, hosts.View{Namespace: "shop", Families: v4}},
		{"labels, and other metadata", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"PORT": 1, "LABELS": map[string]any{"a": "b"}}, hosts.View{Namespace: "shop", Families: v4}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			meta, err := structpb.NewStruct(tt.meta)
			if err != nil {
				t.Fatal(err)
			}
			got, err := parseNode(&corev3.Node{Id: tt.id, Metadata: meta})
			if err != nil || got.view != tt.want {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tt.want)
			}
			if _, labelled := tt.meta["LABELS"]; labelled != slices.Equal(got.labels, hosts.NewLabels(map[string]string{"a": "b"})) {
				t.Errorf("labels %v", got.labels)
			}
		})
	}
}

// The node of Istio's agent is decoded and parsed.
func TestIstioAgentNode(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "testdata", "istiod", "agent-node.json"))
	if err != nil {
		t.Fatal(err)
	}
	var n corev3.Node
	if err := protojson.Unmarshal(data, &n); err != nil {
		t.Fatal(err)
	}
	want := hosts.View{Namespace: "default", Families: hosts.Families{V4: true, V6: true}, VIPs: true}
	if got, err := parseNode(decoded(t, &discoveryv3.DiscoveryRequest{Node: &n, TypeUrl: TypeURL}).node); err != nil || got.view != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}
