package deploy

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// TestMeshConfig checks that both files and all their settings are valid, and that they
// switch capture.
func TestMeshConfig(t *testing.T) {
	t.Parallel()
	rules := output(t, command(t, nil, "nametap", "capture", "print", "--clean", "--mesh-config", "mesh-config/on.yaml"))
	if !strings.Contains(rules, "192.0.2.0/24") {
		t.Errorf("the exclusion is not in the rules:\n%s", rules)
	}
	text := output(t, command(t, nil, "nametap", "capture", "apply", "--mesh-config", "mesh-config/off.yaml"))
	if want := "no rules installed: ISTIO_META_DNS_CAPTURE=false (mesh config"; !strings.Contains(text, want) {
		t.Errorf("%q does not contain %q", text, want)
	}
	netns.Need(t, "iptables")
	ns := netns.New(t)
	// Without rules the command fails after it has printed the switch.
	text = ns.Exec("sh", "-c", binaries.Dir(t)+"/nametap capture status --mesh-config mesh-config/on.yaml || true")
	if want := "ISTIO_META_DNS_CAPTURE=true (mesh config"; !strings.Contains(text, want) {
		t.Errorf("%q does not contain %q", text, want)
	}
}

// TestAnnotation checks that the annotation switches the capture of one pod off.
func TestAnnotation(t *testing.T) {
	t.Parallel()
	var patch struct {
		Metadata struct{ Annotations map[string]string }
	}
	if err := yaml.UnmarshalStrict([]byte(read(t, "mesh-config/annotation.yaml")), &patch); err != nil {
		t.Fatal(err)
	}
	environ := []string{"PROXY_CONFIG=" + patch.Metadata.Annotations[proxyConfig]}
	text := output(t, command(t, environ, "nametap", "capture", "apply", "--mesh-config", "mesh-config/on.yaml"))
	if want := "no rules installed: ISTIO_META_DNS_CAPTURE=false (PROXY_CONFIG"; !strings.Contains(text, want) {
		t.Errorf("%q does not contain %q", text, want)
	}
}
