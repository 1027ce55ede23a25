package interop

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestNamespaces creates pods in namespaces that one webhook serves in different ways, as soon as the API server's cache
// has their annotations.
func TestNamespaces(t *testing.T) { // I11, I16, I17, I18
	c := newInjectedCluster(t)
	c.startWebhook("160")
	c.setInjectConfig("nameservers: [10.96.0.10]\n")
	text := "metadata: {name: app}\nspec: {securityContext: {runAsNonRoot: true}, containers: [" + restrictedContainer + "]}\n"
	wait.Until(t, "the settings are in use", func() bool {
		_, err := c.dryRun("enabled", strings.Replace(text, "{name: app}", "{name: app, annotations: {nametap.dev/mode: resolv}}", 1))
		return err == nil
	})
	variable := func(c corev1.Container, name string) string {
		for _, v := range c.Env {
			if v.Name == name {
				return v.Value
			}
		}
		return ""
	}
	for name, test := range map[string]struct {
		labels, annotations, mode, address, refusal string
		user                                        int64
	}{
		"privileged": {"pod-security.kubernetes.io/enforce: privileged", "", "rules", "", "", 1337},
		"restricted": {"pod-security.kubernetes.io/enforce: restricted", "nametap.dev/mode: resolv", "resolv", "127.0.0.1:53", "", 1337},
		"ambient":    {"istio.io/dataplane-mode: ambient", "", "rules", "localhost:15056", "", 1337},
		"openshift":  {"pod-security.kubernetes.io/enforce: restricted", "nametap.dev/mode: resolv, openshift.io/sa.scc.uid-range: 1000650000/10000", "resolv", "127.0.0.1:53", "", 1000650001},
		"capturing":  {"", "openshift.io/sa.scc.uid-range: 1000650000/10000", "", "", "use the mode resolv", 0},
		"mistaken":   {"", "nametap.dev/mode: cni", "", "", `annotation nametap.dev/mode: mode "cni"`, 0},
	} {
		c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {nametap.dev/inject: enabled}}\n", name))
		c.account(name)
		c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {nametap.dev/inject: enabled, %s}, annotations: {%s}}\n", name, test.labels, test.annotations))
		var pod *corev1.Pod
		var err error
		wait.Until(t, name+" has its annotations", func() bool {
			pod, err = c.dryRun(name, text)
			return (err != nil) == (test.refusal != "") && (err != nil || strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"`+test.mode+`"`))
		})
		if test.refusal != "" {
			if err == nil || !strings.Contains(err.Error(), "nametap cannot be added to this pod") || !strings.Contains(err.Error(), test.refusal) {
				t.Errorf("%s: %v, want %q", name, err, test.refusal)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		agent := pod.Spec.InitContainers[0]
		if !strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"`+test.mode+`"`) || variable(agent, "NAMETAP_DNS_ADDR") != test.address || *agent.SecurityContext.RunAsUser != test.user {
			t.Errorf("%s: %v %+v", name, pod.Annotations, agent)
		}
		if got := pod.Annotations["ambient.istio.io/dns-capture"]; (got == "false") != (name == "ambient") {
			t.Errorf("%s: the DNS capture of ztunnel is %q", name, got)
		}
	}
}
