package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/istiocni"
)

// TestAmbient checks that in a pod of Istio's ambient mode each query is answered once: that for a mesh
// name by the agent, and that for another name by the nameserver, which gets one query.
func TestAmbient(t *testing.T) { // K20
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		v.capabilities = nil
		v.environment = append(v.environment, "KUBERNETES_SERVICE_HOST=10.96.0.1")
		v.Pipe(istiocni.Ambient(false), "iptables-"+v.backend+"-restore", "--noflush", "-w", "5")
		v.Pipe(istiocni.Ambient(true), "ip6tables-"+v.backend+"-restore", "--noflush", "-w", "5")
		v.start()
		if r := v.root(v.args("apply")...); r.code != 0 || !strings.Contains(r.stdout, "ztunnel (Istio's ambient mode) capture port 53 too") {
			t.Fatalf("%+v", r)
		}
		n := 0
		for _, server := range []string{named, named6} {
			for _, over := range []string{"+notcp", "+tcp"} {
				for name, want := range map[string]string{mesh: meshIP, "www.example.org": namedIP} {
					forwarded := 0
					if name != mesh {
						forwarded = 1
						n++
						name = strings.Repeat("w", n) + ".example.org" // not from the cache
					}
					v.named.Reset()
					v.named6.Reset()
					before := v.metric("istio_agent_dns_requests_total")
					if got := v.dig("+tries=1", over, "@"+server, name); got != want {
						t.Errorf("dig %s @%s %s: %s, want %s", over, server, name, got, want)
					}
					if got := v.metric("istio_agent_dns_requests_total") - before; got != 1 {
						t.Errorf("dig %s @%s %s: the agent has received %v queries", over, server, name, got)
					}
					if got := len(v.named.Queries()) + len(v.named6.Queries()); got != forwarded {
						t.Errorf("dig %s @%s %s: the nameserver has received %d queries, want %d", over, server, name, got, forwarded)
					}
				}
			}
		}
		for _, subcommand := range []string{"status", "check"} {
			if r := v.root(v.args(subcommand)...); !strings.Contains(r.stdout, "ztunnel") || r.code != 0 {
				t.Errorf("%s: %+v", subcommand, r)
			}
		}
	})
}
