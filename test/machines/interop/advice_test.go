package interop

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// C5: when istiod refuses an agent, or the agent refuses istiod, the log and `nametap status`
// name the setting to check.
func TestAdvice(t *testing.T) {
	d := start(t, options{})
	m := d.machine(onlyIPv4)
	token := m.write("token", d.token("shop", audience))
	for _, tc := range []struct {
		name  string
		flags []string
		want  []string // in the message
	}{
		{"token of another namespace", []string{"--xds-token-file", m.write("back", d.token("back", audience))}, []string{"PermissionDenied", "--namespace"}},
		{"another service account", []string{"--service-account", "other"}, []string{"PermissionDenied", "--service-account"}},
		{"token for another audience", []string{"--xds-token-file", m.write("vault", d.token("shop", "vault"))}, []string{"Unauthenticated", "--xds-token-file", "istio-ca"}},
		{"expired token", []string{"--xds-token-file", m.write("expired", d.shortToken("shop", time.Now().Add(-time.Minute)))}, []string{"Unauthenticated", "--xds-token-file", "has expired"}},
		{"no token", []string{"--xds-token-file", m.path("nothing")}, []string{"no such file", "--xds-token-file"}},
		{"no credentials", []string{"--xds-token-file", ""}, []string{"Unauthenticated", "--xds-token-file"}},
		{"no root certificate", []string{"--xds-root-ca", m.path("nothing")}, []string{"no such file", "--xds-root-ca"}},
		{"another root certificate", []string{"--xds-root-ca", m.write("other.pem", d.apiCertificate())}, []string{"unknown authority", "--xds-root-ca"}},
		{"another server name", []string{"--xds-server-name", "istiod.istio-system.svc.cluster.local"}, []string{"--xds-server-name"}},
		{"unknown cluster", []string{"--cluster-id", "west"}, []string{"Unauthenticated", "--cluster-id"}},
		{"TLS at the port without", []string{"--xds-addr", m.address(d.port(15010))}, []string{"does not speak TLS", "--xds-plaintext"}},
		{"no TLS at the port with", []string{"--xds-plaintext"}, []string{"leave out --xds-plaintext"}},
		{"nothing listens", []string{"--xds-addr", m.address("15999")}, []string{"connection refused", "--xds-addr"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := pod{strings.ReplaceAll(tc.name, " ", "-"), "shop"}
			a := m.launch(p, slices.Concat(m.secure(d), []string{"--xds-token-file", token, "--workload-cert", "off"}, tc.flags)...)
			defer a.end(terminate)
			a.await("the agent logs why it has no stream", func() bool { return a.logged("no stream to the control plane") > 0 })
			status := ""
			a.await("the status says why there is no stream", func() bool {
				status = string(a.nametap("status"))
				return strings.Contains(status, tc.want[0])
			})
			for _, part := range tc.want {
				if a.logged("no stream to the control plane", part) == 0 || !strings.Contains(status, part) {
					t.Errorf("the message lacks %q:\n%s\n%s", part, a.text(), status)
				}
			}
		})
	}
}
