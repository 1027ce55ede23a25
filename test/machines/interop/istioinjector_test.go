package interop

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// istiosWebhook applies the configuration of Istio's injector and its webhook, from Istio's own
// chart, and has the API server find the webhook of istiod. In the namespace shop both injectors
// are on.
func (c *injectedCluster) istiosWebhook() {
	c.TB.Helper()
	c.Write("mesh.yaml", "defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\"}}\n")
	c.ApplyIstio()
	c.Apply(`
apiVersion: v1
kind: Service
metadata: {name: istiod, namespace: istio-system}
spec: {ports: [{name: https-webhook, port: 443}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: istiod, namespace: istio-system, labels: {kubernetes.io/service-name: istiod}}
addressType: IPv4
ports: [{name: https-webhook, port: 15117}]
endpoints: [{addresses: [` + lab.ClusterAddr + `], conditions: {ready: true}}]
`)
	c.namespace("shop", "istio-injection: enabled, nametap.dev/inject: enabled", "")
	chart := lab.PeerPath(c.TB, "istiod", "istio.io/istio", "manifests/charts/istio-control/istio-discovery")
	c.Apply(c.Helm("helm4", "template", "istiod", chart, "--namespace", "istio-system", "--kube-version", "1.36.1",
		"--set", "global.hub=example.com/istio,global.tag=1.31",
		"--show-only", "templates/istiod-injector-configmap.yaml", "--show-only", "templates/mutatingwebhook.yaml"))
}

// TestIstiosInjector creates a pod that Istio's webhook and nametap's webhook inject at once. native is whether Istio's
// sidecar is an init container.
func TestIstiosInjector(t *testing.T) { // I5
	c := newInjectedCluster(t)
	c.istiosWebhook()
	c.startWebhook("160")
	for _, native := range []bool{false, true} {
		for mode, settings := range map[string]string{"rules": injectSettings, "resolv": injectModes["resolv"]} {
			t.Run(fmt.Sprintf("native sidecars %v/%s", native, mode), func(t *testing.T) {
				c := c.in(t)
				c.Istiod(lab.IstiodOptions{Args: []string{"--httpsAddr=" + lab.ClusterAddr + ":15117"}, Env: []string{
					"INJECTION_WEBHOOK_CONFIG_NAME=istio-sidecar-injector", "REVISION=default", "ENABLE_NATIVE_SIDECARS=" + strconv.FormatBool(native),
				}})
				c.Write("inject.yaml", settings)
				var pod *corev1.Pod
				wait.Until(t, "both inject", func() bool {
					var err error
					pod, err = c.dryRun("shop", shopPod)
					return err == nil && hasIstio(pod, native) && strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"`+mode+`"`)
				})
				checkInjectors(t, pod, mode)
			})
		}
	}
}

// shopPod is a pod with probes, which Istio's injector redirects. Its dnsPolicy is the default,
// which the API server would set before Istio's injector, but only after nametap's.
const shopPod = `
apiVersion: v1
kind: Pod
metadata: {name: shop}
spec:
  dnsPolicy: ClusterFirst
  initContainers: [{name: prepare, image: busybox}]
  containers:
    - {name: app, image: app, ports: [{containerPort: 8080}], readinessProbe: {httpGet: {path: /ready, port: 8080}}}
`

// checkInjectors checks that nametap's containers are the first ones, that one agent captures DNS, and that the ports and
// the probes of both differ.
func checkInjectors(t *testing.T, pod *corev1.Pod, mode string) {
	t.Helper()
	var names []string
	for _, c := range pod.Spec.InitContainers {
		names = append(names, c.Name)
	}
	first := map[string][]string{"rules": {"nametap", "nametap-capture"}, "resolv": {"nametap"}}[mode]
	if len(names) <= len(first) || !slices.Equal(names[:len(first)], first) || !slices.Contains(names, "prepare") || !slices.Contains(names, "istio-init") {
		t.Errorf("init containers: %q, want %q first", names, first)
	}
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	agent := all[slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == "nametap" })]
	for _, c := range all {
		if !strings.HasPrefix(c.Name, "istio-") {
			continue
		}
		captures := slices.DeleteFunc(slices.Clone(c.Env), func(v corev1.EnvVar) bool { return v.Name != "ISTIO_META_DNS_CAPTURE" })
		if len(captures) != 1 || captures[0].Value != "false" {
			t.Errorf("%s: %v", c.Name, captures)
		}
		for _, port := range c.Ports {
			if slices.ContainsFunc(agent.Ports, func(p corev1.ContainerPort) bool { return p.ContainerPort == port.ContainerPort }) {
				t.Errorf("%s has the port %d of nametap", c.Name, port.ContainerPort)
			}
		}
	}
	const excluded = "traffic.sidecar.istio.io/excludeInboundPorts"
	for where, ports := range map[string]string{excluded: pod.Annotations[excluded], "istio-init -d": argument(all, "istio-init", "-d")} {
		if list := strings.Split(ports, ","); !slices.Contains(list, "15055") || !slices.Contains(list, "15021") {
			t.Errorf("%s excludes %q, want also nametap's status port and Istio's own ports", where, ports)
		}
	}
	if agent.ReadinessProbe.Exec == nil || agent.LivenessProbe.Exec == nil {
		t.Errorf("Istio's rules would redirect the probes of nametap: %+v", agent)
	}
}

// argument returns what follows a flag in the arguments of a container.
func argument(containers []corev1.Container, name, flag string) string {
	args := containers[slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == name })].Args
	if i := slices.Index(args, flag); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}

// hasIstio reports whether Istio's sidecar is where istiod puts it.
func hasIstio(pod *corev1.Pod, native bool) bool {
	list := pod.Spec.Containers
	if native {
		list = pod.Spec.InitContainers
	}
	return slices.ContainsFunc(list, func(c corev1.Container) bool { return c.Name == "istio-proxy" })
}
