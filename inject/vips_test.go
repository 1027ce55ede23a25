package inject_test

import (
	"testing"

	"github.com/nametap/nametap/inject"
)

// TestIstioCarriesVIPs checks that the agent leaves connections to VIPs to Envoy, which needs VIPs in DNS.
func TestIstioCarriesVIPs(t *testing.T) { // I5
	t.Parallel()
	cfg := inject.Config{Settings: map[string]string{"egress": "true", "egress-source": "10.0.0.1"}}
	for text, want := range map[string][2]string{plain: {"true", ""}, istio(t, plain): {"", "true"}} {
		for _, c := range injected(t, text, cfg).Spec.InitContainers[:2] {
			values := variables(c)
			if got := [2]string{values["NAMETAP_EGRESS"], values["NAMETAP_DNS_AUTO_ALLOCATE"]}; got != want {
				t.Errorf("%s: NAMETAP_EGRESS and NAMETAP_DNS_AUTO_ALLOCATE are %q, want %q", c.Name, got, want)
			}
		}
	}
	cfg.Settings["dns-auto-allocate"] = "false"
	if v := variables(injected(t, istio(t, plain), cfg).Spec.InitContainers[0])["NAMETAP_DNS_AUTO_ALLOCATE"]; v != "false" {
		t.Errorf("NAMETAP_DNS_AUTO_ALLOCATE is %q", v)
	}
}
