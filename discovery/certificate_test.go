package discovery

import (
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestReplicasShareCertificate starts three replicas at once. They present one certificate, which
// agents of each namespace can verify. The namespaces of Kubernetes itself get no ConfigMap.
func TestReplicasShareCertificate(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	a.HoldWrites(3) // each of them tries to create the Secret
	replicas := make([]replica, 3)
	for i := range replicas {
		replicas[i] = replica{startUnready(t, a.config(testlog.New(t)))}
	}
	for _, r := range replicas {
		wait.For(t, "the replica is ready", r.Ready())
	}
	if w := a.Writes(); w["POST /api/v1/secrets Created"] != 1 || w["PUT /api/v1/secrets OK"] != 0 {
		t.Errorf("requests that write: %v", w)
	}
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("shop") != "" && a.roots("data") != "" })
	leaf := a.shared().Server().Leaf
	for i, r := range replicas {
		if !r.presents(t, a.roots("data"), leaf) {
			t.Errorf("replica %d presents another certificate", i)
		}
		if p := reviewed(func() client { return openDelta(t, r.as(a.roots("shop")), node(t, "shop"), nil) }); p.end != nil {
			t.Errorf("replica %d: %v", i, p.end)
		}
	}
	if !slices.Equal(leaf.DNSNames, sharedNames()) {
		t.Errorf("the certificate is for %q, want %q", leaf.DNSNames, sharedNames())
	}
	if a.roots("kube-system") != "" {
		t.Error("kube-system has a ConfigMap")
	}
}

// Flags that contradict each other are refused.
func TestTLSFlags(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"no certificate", Config{TLSAddr: ":0"}, "set --tls-cert and --tls-key, or --tls-secret"},
		{"two certificates", Config{TLSAddr: ":0", TLSSecret: &TLSSecret{}, TLS: auth.Files{Certificate: "cert", Key: "key"}}, "two certificates"},
		{"no address", Config{TLSSecret: &TLSSecret{}}, "--tls-addr"},
		{"bad name", Config{TLSAddr: ":0", TLSSecret: &TLSSecret{DNSNames: []string{"a b"}}}, "want a DNS name"},
	} {
		tt.cfg.ConfigDir = dir
		if _, err := New(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}
