package interop

import (
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

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

// TestIstiosInjector runs `nametap inject` and the injector of an unmodified istiod in both orders. native is whether Istio's
// sidecar is an init container. Then both webhooks inject a pod at once.
func TestIstiosInjector(t *testing.T) { // I5
	c := newInjectedCluster(t)
	c.istiosWebhook()
	for _, native := range []bool{false, true} {
		t.Run(fmt.Sprintf("native sidecars %v", native), func(t *testing.T) {
			c := c.in(t)
			c.Istiod(lab.IstiodOptions{Args: []string{"--httpsAddr=" + lab.ClusterAddr + ":15117"}, Env: []string{
				"INJECTION_WEBHOOK_CONFIG_NAME=istio-sidecar-injector", "REVISION=default", "ENABLE_NATIVE_SIDECARS=" + strconv.FormatBool(native),
			}})
			for _, mode := range []string{"rules", "resolv"} {
				t.Run(mode, func(t *testing.T) { injectors{c.in(t), mode, native}.test(t) })
			}
			if !native {
				return
			}
			in := injectors{c, "rules", true}
			c.startWebhook("160")
			var pod *corev1.Pod
			wait.Until(t, "both inject", func() bool {
				var err error
				pod, err = in.create(in.read(shopPod), "shop")
				return err == nil && in.hasIstio(pod) && pod.Annotations[injectStatus] != ""
			})
			in.check(t, pod)
		})
	}
}

// injectors are nametap's and Istio's.
type injectors struct {
	*injectedCluster
	mode   string
	native bool
}

// shopPod is a pod with probes, which Istio's injector redirects. Its dnsPolicy is the default,
// which the API server would set before Istio's injector, but only after nametap's.
const shopPod = `
apiVersion: v1
kind: Pod
metadata: {name: shop, namespace: shop}
spec:
  dnsPolicy: ClusterFirst
  initContainers: [{name: prepare, image: busybox}]
  containers:
    - {name: app, image: app, ports: [{containerPort: 8080}], readinessProbe: {httpGet: {path: /ready, port: 8080}}}
`

func (in injectors) test(t *testing.T) {
	plain := in.read(shopPod)
	wait.Until(t, "the API server asks istiod", func() bool { // when istiod has written its certificate
		pod, err := in.create(plain, "shop")
		return err == nil && in.hasIstio(pod)
	})
	// As both webhooks run: nametap's again if Istio's has changed the pod.
	after := in.nametap(in.istio(plain))
	between := in.nametap(in.istio(in.nametap(plain)))
	if diff := cmp.Diff(in.comparable(after), in.comparable(between)); diff != "" {
		t.Errorf("after Istio's injector (-), and before and after it (+):\n%s", diff)
	}
	in.check(t, between)
	// Istio's injector may run again, as on a manifest that was read from the cluster.
	again := between
	for range 2 {
		next := in.nametap(in.istio(again))
		if diff := cmp.Diff(in.comparable(again), in.comparable(next)); diff != "" {
			t.Errorf("another round changes the pod:\n%s", diff)
		}
		again = next
	}
}

// check checks that nametap's containers are the first ones, and apart from Istio's.
func (in injectors) check(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	var names []string
	for _, c := range pod.Spec.InitContainers {
		names = append(names, c.Name)
	}
	first := map[string][]string{"rules": {"nametap", "nametap-capture"}, "resolv": {"nametap"}}[in.mode]
	t.Logf("init containers: %q", names)
	if len(names) <= len(first) || !slices.Equal(names[:len(first)], first) || !slices.Contains(names, "prepare") || !slices.Contains(names, "istio-init") {
		t.Errorf("init containers: %q, want %q first", names, first)
	}
	in.apart(t, pod)
}

// apart checks that one agent captures DNS, and that the ports and the probes of both differ.
func (in injectors) apart(t *testing.T, pod *corev1.Pod) {
	t.Helper()
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
	if agent.ReadinessProbe.Exec == nil || agent.LivenessProbe.Exec == nil {
		t.Errorf("Istio's rules would redirect the probes of nametap: %+v", agent)
	}
}

// comparable returns a pod with the defaults of the API server, and without the list of probes in istio-proxy: Istio's
// injector keeps probes in it that it has redirected once, and that are no longer in the pod.
func (in injectors) comparable(pod *corev1.Pod) *corev1.Pod {
	in.TB.Helper()
	pod = pod.DeepCopy()
	pod.Namespace = "default" // which no injector serves
	pod, err := in.create(pod, "default")
	if err != nil {
		in.TB.Fatal(err)
	}
	in.withoutServer(pod)
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			list[i].Env = slices.DeleteFunc(list[i].Env, func(v corev1.EnvVar) bool { return v.Name == "ISTIO_KUBE_APP_PROBERS" })
		}
	}
	return pod
}

// hasIstio reports whether Istio's sidecar is where this istiod puts it.
func (in injectors) hasIstio(pod *corev1.Pod) bool {
	list := pod.Spec.Containers
	if in.native {
		list = pod.Spec.InitContainers
	}
	return slices.ContainsFunc(list, func(c corev1.Container) bool { return c.Name == "istio-proxy" })
}

// read reads a pod.
func (in injectors) read(text string) *corev1.Pod {
	in.TB.Helper()
	pod := new(corev1.Pod)
	if err := yaml.UnmarshalStrict([]byte(text), pod); err != nil {
		in.TB.Fatalf("%v\n%s", err, text)
	}
	return pod
}

// create has the API server make a pod, which calls istiod, without keeping it.
func (in injectors) create(pod *corev1.Pod, namespace string) (*corev1.Pod, error) {
	created := new(corev1.Pod)
	return created, in.Do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods?dryRun=All", pod, created)
}

// istio returns a pod that Istio's injector has changed, without what the API server adds.
func (in injectors) istio(pod *corev1.Pod) *corev1.Pod {
	in.TB.Helper()
	injected, err := in.create(pod, "shop")
	if err != nil || !in.hasIstio(injected) {
		in.TB.Fatalf("istiod has not injected the pod: %v\n%+v", err, injected)
	}
	return in.withoutServer(injected)
}

// withoutServer returns a pod without what the API server adds, except for defaults.
func (in injectors) withoutServer(injected *corev1.Pod) *corev1.Pod {
	injected.UID, injected.ResourceVersion, injected.Generation, injected.ManagedFields, injected.Status = "", "", 0, nil, corev1.PodStatus{}
	injected.CreationTimestamp.Reset()
	// The name of the volume of the account's token is random.
	injected.Spec.Volumes = slices.DeleteFunc(injected.Spec.Volumes, func(v corev1.Volume) bool { return strings.HasPrefix(v.Name, "kube-api-access-") })
	for _, list := range [][]corev1.Container{injected.Spec.InitContainers, injected.Spec.Containers} {
		for i := range list {
			list[i].VolumeMounts = slices.DeleteFunc(list[i].VolumeMounts, func(m corev1.VolumeMount) bool { return strings.HasPrefix(m.Name, "kube-api-access-") })
		}
	}
	return injected
}

// nametap returns a pod that `nametap inject` has changed.
func (in injectors) nametap(pod *corev1.Pod) *corev1.Pod {
	in.TB.Helper()
	text, err := yaml.Marshal(pod)
	if err != nil {
		in.TB.Fatal(err)
	}
	cmd := exec.CommandContext(in.TB.Context(), lab.Program(in.TB, "nametap-discovery"), "inject", "--mode", in.mode, "--nameserver", "10.96.0.10")
	var stderr strings.Builder
	cmd.Stdin, cmd.Stderr = strings.NewReader(string(text)), &stderr
	output, err := cmd.Output()
	if err != nil || !strings.Contains(stderr.String(), "shop/shop: injected: ") {
		in.TB.Fatalf("%v: %s", err, &stderr)
	}
	return in.read(string(output))
}
