package discovery

import (
	"os"
	"path/filepath"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
)

func TestParseNode(t *testing.T) {
	v4, v6 := families{v4: true}, families{v6: true}
	for _, tt := range []struct {
		name, id string
		meta     map[string]any
		want     viewKey
	}{
		{"id alone", "sidecar~10.0.0.1~web-0.shop~shop.svc.cluster.local", nil, viewKey{namespace: "shop", families: v4}},
		{"pod with dots", "sidecar~10.0.0.1~a.b.c.shop~x", nil, viewKey{namespace: "shop", families: v4}},
		{"metadata takes precedence over the id", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"NAMESPACE": "data", "INSTANCE_IPS": ""},
			viewKey{namespace: "data", families: v4}},
		{"IPv6", "sidecar~fd00::1~web-0.shop~x", nil, viewKey{namespace: "shop", families: v6}},
		{"dual", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"INSTANCE_IPS": "10.0.0.1, fd00::1"}, viewKey{namespace: "shop", families: bothFamilies}},
		{"link-local is ignored", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"INSTANCE_IPS": "10.0.0.1,fe80::1,::1"}, viewKey{namespace: "shop", families: v4}},
		{"mapped", "sidecar~::ffff:10.0.0.1~web-0.shop~x", nil, viewKey{namespace: "shop", families: v4}},
		{"unknown families", "sidecar~0.0.0.0~web-0.shop~x", nil, viewKey{namespace: "shop", families: bothFamilies}},
		{"loopback", "sidecar~127.0.0.1~web-0.shop~x", nil, viewKey{namespace: "shop", families: bothFamilies}},
		{"asks for VIPs", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_AUTO_ALLOCATE": "true"}, viewKey{namespace: "shop", families: v4, vips: true}},
		{"asks and does not capture", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "false", "DNS_AUTO_ALLOCATE": "true"}, viewKey{namespace: "shop", families: v4}},
		{"captures and does not ask", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "true"}, viewKey{namespace: "shop", families: v4}},
		{"switches", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"DNS_CAPTURE": "false", "NAMETAP_MERGE": "true"}, viewKey{namespace: "shop", families: v4, merge: true}},
		{"labels, and other metadata", "sidecar~10.0.0.1~web-0.shop~x", map[string]any{"PORT": 1, "LABELS": map[string]any{"a": "b"}}, viewKey{namespace: "shop", families: v4}},
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
			if _, labelled := tt.meta["LABELS"]; labelled != (got.labels["a"] == "b") {
				t.Errorf("labels %v", got.labels)
			}
		})
	}
}

// The node of Istio's agent is parsed.
func TestIstioAgentNode(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "istiod", "agent-node.json"))
	if err != nil {
		t.Fatal(err)
	}
	var n corev3.Node
	if err := protojson.Unmarshal(data, &n); err != nil {
		t.Fatal(err)
	}
	want := viewKey{namespace: "default", families: bothFamilies, vips: true}
	if got, err := parseNode(&n); err != nil || got.view != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	// It gets one table, in both variants.
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
