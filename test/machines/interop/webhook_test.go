package interop

import (
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

var (
	creationRate = flag.Int("interop.creations", 50, "pods created a second by TestWebhook/creations")
	creationTime = flag.Duration("interop.creating", 3*time.Second, "how long TestWebhook/creations creates pods in each step")
)

// TestWebhook has a real API server ask nametap-discovery about pods. See the subtests. The last ones end replicas.
func TestWebhook(t *testing.T) { // I1, I2, I3, I5, I7, I9, I11, I14, I16, I17, I18
	c := newInjectedCluster(t, "--enable-admission-plugins=AlwaysPullImages")
	pods := podTable(t)
	c.Kubectl("--namespace", "enabled", "apply", "-f", c.Write("limits.yaml", limits))
	offline := map[string]map[string]verdict{}
	for mode, settings := range injectModes {
		c.Write("inject.yaml", settings)
		offline[mode] = c.offline(t, mode, pods)
	}
	c.startWebhook("160", "170")
	t.Run("pods", func(t *testing.T) { c.in(t).testPods(t, pods, offline) })
	t.Run("namespaces", func(t *testing.T) { c.in(t).testNamespaces(t) })
	t.Run("creations", func(t *testing.T) { c.testCreations(t) })
	t.Run("away", func(t *testing.T) { c.in(t).testAway(t) })
}

// podDocuments are the pods of TestWebhook.
//
//go:embed testdata/pods.yaml
var podDocuments string

// limits are objects that add to the resources of containers, and refuse pods without them.
const limits = `
apiVersion: v1
kind: LimitRange
metadata: {name: max}
spec: {limits: [{type: Container, max: {cpu: "2", memory: 2Gi}}]}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: limits}
spec: {hard: {limits.cpu: "100", limits.memory: 100Gi}}
`

// The settings of injection that are compared.
var injectModes = map[string]string{
	"rules":  injectSettings + "clusterID: c1\nsettings: {cache-size: 8MiB, drain: 1s, service-account: other}\n",
	"resolv": "mode: resolv\nrootCert: nametap-ca-root-cert\nclusterDomain: corp.example\nnameservers: [10.96.0.10, 'fd00:96::a']\n",
}

// podTable reads testdata/pods.yaml: pods by name.
func podTable(t *testing.T) map[string]string {
	t.Helper()
	pods := map[string]string{}
	for document := range strings.SplitSeq(podDocuments, "\n---\n") {
		var pod corev1.Pod
		if err := yaml.UnmarshalStrict([]byte(document), &pod); err != nil || pods[pod.Name] != "" {
			t.Fatalf("%v, or two pods of one name\n%s", err, document)
		}
		pods[pod.Name] = document
	}
	return pods
}

// A verdict is what becomes of a pod.
type verdict struct {
	Spec        corev1.PodSpec
	Annotations map[string]string
	Refusal     string
}

// randomName matches the name of the volume with the token of a pod.
var randomName = regexp.MustCompile(`kube-api-access-\w{5}`)

// verdictOf returns the verdict in a form that can be compared: the token's volume has a random name, and
// is added by the API server before or after others.
func verdictOf(t *testing.T, pod *corev1.Pod, err error) verdict {
	t.Helper()
	if err != nil {
		_, message, found := strings.Cut(err.Error(), "nametap cannot be added to this pod: ")
		if !found {
			message = err.Error()
		}
		return verdict{Refusal: message}
	}
	text, err := json.Marshal(pod.Spec)
	if err != nil {
		t.Fatal(err)
	}
	v := verdict{Annotations: pod.Annotations}
	if err := json.Unmarshal(randomName.ReplaceAll(text, []byte("kube-api-access")), &v.Spec); err != nil {
		t.Fatal(err)
	}
	// The API server adds it to the containers of pods that are injected offline only: it does so before
	// it asks for admission. The agent does not use it.
	for i := range v.Spec.InitContainers {
		if c := &v.Spec.InitContainers[i]; c.Name == "nametap" || c.Name == "nametap-capture" {
			c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "kube-api-access" })
			if len(c.VolumeMounts) == 0 {
				c.VolumeMounts = nil
			}
		}
	}
	slices.SortStableFunc(v.Spec.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	// The API server sets the default before it asks for admission, so that is the pod's own policy then.
	if s := v.Annotations[injectStatus]; s != "" {
		v.Annotations[injectStatus] = strings.Replace(s, `,"dnsPolicy":"ClusterFirst"`, "", 1)
	}
	if delete(v.Annotations, "kubernetes.io/limit-ranger"); len(v.Annotations) == 0 { // lists what LimitRanger has set the last time
		v.Annotations = nil
	}
	return v
}

// offline returns the verdicts of `nametap-discovery inject`, in a cluster that does not inject. Pods are
// in the namespace whose name is in their settings.
func (c *injectedCluster) offline(t *testing.T, mode string, pods map[string]string) map[string]verdict {
	t.Helper()
	verdicts := map[string]verdict{}
	for name, text := range pods {
		injected, err := c.inject("enabled", text)
		if err != nil {
			_, reason, _ := strings.Cut(strings.TrimSpace(err.Error()), ": refused: ")
			verdicts[name] = verdict{Refusal: reason}
			continue
		}
		pod, err := c.dryRun("enabled", injected)
		v := verdictOf(t, pod, err)
		verdicts[name] = v
		if v.Refusal == "" && v.Annotations[injectStatus] == "" && !strings.HasPrefix(name, "skipped-") {
			t.Errorf("%s: %s is not injected", mode, name)
		}
	}
	return verdicts
}

// testPods injects many pods by the webhook, in both modes, where LimitRanges, quotas on limits and AlwaysPullImages have
// their say. The API server makes of them what it makes of pods that are injected offline. A second injection changes
// nothing, byte for byte.
func (c *injectedCluster) testPods(t *testing.T, pods map[string]string, offline map[string]map[string]verdict) {
	for mode, settings := range injectModes {
		c.Write("inject.yaml", settings)
		wait.Until(t, "the settings of mode "+mode+" are in use", func() bool {
			pod, err := c.dryRun("enabled", pods["plain"])
			return cmp.Equal(offline[mode]["plain"], verdictOf(t, pod, err))
		})
		refused := 0
		for name, text := range pods {
			pod, err := c.dryRun("enabled", text)
			got := verdictOf(t, pod, err)
			if diff := cmp.Diff(offline[mode][name], got); diff != "" {
				t.Errorf("mode %s, pod %s (-offline +webhook):\n%s", mode, name, diff)
			}
			if err != nil {
				refused++
				continue
			}
			again, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": pod.Name, "labels": pod.Labels, "annotations": pod.Annotations}, "spec": pod.Spec})
			if err != nil {
				t.Fatal(err)
			}
			twice, err := c.dryRun("enabled", string(again)+"\n# kind: Pod\n")
			if diff := cmp.Diff(got, verdictOf(t, twice, err)); diff != "" {
				t.Errorf("%s: a second injection (-first +second):\n%s", name, diff)
			}
		}
		t.Logf("%s: %d pods, %d of them refused", mode, len(pods), refused)
		if refused == len(pods) {
			t.Errorf("%s: no pod is injected", mode)
		}
	}
}

// testNamespaces creates pods in namespaces that one webhook serves in different ways, as soon as the API server's cache
// has their annotations.
func (c *injectedCluster) testNamespaces(t *testing.T) {
	c.awaitSettings("nameservers: [10.96.0.10]\n", func(pod *corev1.Pod) bool { return strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"rules"`) })
	text := "metadata: {name: app}\nspec: {securityContext: {runAsNonRoot: true}, containers: [" + restrictedContainer + "]}\n"
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
		"baseline":   {"pod-security.kubernetes.io/enforce: baseline", "", "", "", "violates PodSecurity", 0},
		"restricted": {"pod-security.kubernetes.io/enforce: restricted", "nametap.dev/mode: resolv", "resolv", "127.0.0.1:53", "", 1337},
		"ambient":    {"istio.io/dataplane-mode: ambient", "", "rules", "localhost:15056", "", 1337},
		"openshift":  {"pod-security.kubernetes.io/enforce: restricted", "nametap.dev/mode: resolv, openshift.io/sa.scc.uid-range: 1000650000/10000", "resolv", "127.0.0.1:53", "", 1000650001},
		"capturing":  {"", "openshift.io/sa.scc.uid-range: 1000650000/10000", "", "", "use the mode resolv", 0},
		"mistaken":   {"", "nametap.dev/mode: cni", "", "", `annotation nametap.dev/mode: mode "cni"`, 0},
	} {
		c.namespace(name, "nametap.dev/inject: enabled", "")
		c.namespace(name, "nametap.dev/inject: enabled, "+test.labels, test.annotations)
		var pod *corev1.Pod
		var err error
		wait.Until(t, name+" has its annotations", func() bool {
			pod, err = c.dryRun(name, text)
			if test.refusal != "" {
				return err != nil && strings.Contains(err.Error(), test.refusal)
			}
			return err == nil && strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"`+test.mode+`"`)
		})
		if test.refusal != "" {
			continue
		}
		agent := pod.Spec.InitContainers[0]
		if variable(agent, "NAMETAP_DNS_ADDR") != test.address || *agent.SecurityContext.RunAsUser != test.user {
			t.Errorf("%s: %v %+v", name, pod.Annotations, agent)
		}
		if got := pod.Annotations["ambient.istio.io/dns-capture"]; (got == "false") != (name == "ambient") {
			t.Errorf("%s: the DNS capture of ztunnel is %q", name, got)
		}
	}
}

// testCreations creates pods at a rate, while the certificate is renewed, and replicas are replaced: no creation fails, and no pod is without the agent. It logs the times, also without injection.
func (c *injectedCluster) testCreations(t *testing.T) {
	c.awaitSettings(injectSettings, func(pod *corev1.Pod) bool { return strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"rules"`) })
	c.namespace("created", "nametap.dev/inject: enabled", "")
	c.ControllerManager.End(syscall.SIGTERM) // it would make a few requests for each pod
	var number atomic.Int64
	count := func(what, namespace string, step func()) {
		t.Helper()
		var mu sync.Mutex
		var times []time.Duration
		var failures []string
		var group sync.WaitGroup
		stepped, begun := make(chan struct{}), time.Now()
		const writers = 8
		for range writers {
			group.Go(func() {
				for next := begun; ; next = next.Add(writers * time.Second / time.Duration(*creationRate)) {
					<-time.After(time.Until(next))
					if next.Sub(begun) > *creationTime {
						select {
						case <-stepped:
							return
						default:
						}
					}
					sent := time.Now()
					pod, err := c.create(namespace, strings.Replace(plainPod, "name: app", fmt.Sprintf("name: pod-%d", number.Add(1)), 1), "")
					mu.Lock()
					times = append(times, time.Since(sent))
					if err != nil {
						failures = append(failures, err.Error())
					} else if (pod.Annotations[injectStatus] != "") != (namespace == "created") {
						failures = append(failures, fmt.Sprintf("the annotations are %v", pod.Annotations))
					}
					mu.Unlock()
				}
			})
		}
		step()
		close(stepped)
		group.Wait()
		slices.Sort(times)
		t.Logf("%s: %d pods, p50 %v, p99 %v, %d failed", what, len(times), times[len(times)/2], times[len(times)*99/100], len(failures))
		if len(failures) > 0 {
			t.Errorf("%s: %d creations have failed: %v", what, len(failures), failures[0])
		}
	}
	pause := func() {}
	count("without injection", "none", pause)
	count("webhook, two replicas", "created", pause)
	count("the certificate is renewed", "created", func() {
		certify(c.Cluster)
		for _, r := range c.replicas {
			wait.Until(t, "it is used", func() bool { return r.Logged("TLS files have changed") >= 2 }) // also at the start
		}
	})
	// A pod that is deleted is removed from the endpoints after a second.
	stop := func(remaining ...string) {
		r := c.replicas[0]
		c.replicas = c.replicas[1:]
		r.Signal(syscall.SIGTERM)
		time.Sleep(time.Second) //nolint:forbidigo // as long as Kubernetes takes
		c.endpoints(remaining...)
		wait.For(t, "the replica ends", r.Ended)
	}
	count("replicas are replaced", "created", func() {
		c.replicas = append(c.replicas, startReplica(c.Cluster, c.args, "180"))
		c.endpoints("160", "170", "180")
		stop("170", "180")
		stop("180")
	})
}

// testAway checks that wrong settings are not used, and which pods can be created while no replica runs.
func (c *injectedCluster) testAway(t *testing.T) {
	r := c.replicas[0]
	image := func(want string) func(*corev1.Pod) bool {
		return func(pod *corev1.Pod) bool { return pod.Spec.InitContainers[0].Image == want }
	}
	const failing = "nametap_discovery_inject_settings_error"
	c.awaitSettings("image: other:1\n", image("other:1"))
	c.Write("inject.yaml", "imag: wrong:1\n")
	wait.Until(t, "the error is logged", func() bool { return r.Logged("level=ERROR", "inject.yaml", "imag") == 1 })
	if pod, err := c.dryRun("enabled", plainPod); err != nil || !image("other:1")(pod) || c.Metric(r.status, failing) != 1 {
		t.Error("the previous settings do not stay, or the metric does not say so")
	}
	c.awaitSettings("image: third:1\n", image("third:1"))
	if c.Metric(r.status, failing) != 0 {
		t.Error("the metric does not show the end of the error")
	}

	r.End(syscall.SIGKILL)
	const windows = "{matchExpressions: [{key: a, operator: Exists}, {key: kubernetes.io/os, operator: In, values: [windows]}]}"
	affinity := func(terms string) string {
		return ", affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" + terms + "]}}}"
	}
	for _, pod := range []struct {
		namespace, labels, spec string
		refused                 bool
	}{
		{"none", "{}", "", false}, {"disabled", "{}", "", false}, {"enabled", `{nametap.dev/inject: "false"}`, "", false}, {"enabled", "{}", ", hostNetwork: true", false},
		{"kube-system", `{nametap.dev/inject: "true"}`, "", false}, {discoverySystem, `{app: nametap-discovery}`, "", false},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: windows}", false}, {"enabled", "{}", affinity(windows), false},
		{"enabled", "{}", "", true}, {"none", `{nametap.dev/inject: "true"}`, "", true},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: linux}", true}, {"enabled", "{}", affinity(windows + ", {matchExpressions: [{key: a, operator: Exists}]}"), true},
	} {
		_, err := c.dryRun(pod.namespace, "metadata: {name: app, labels: "+pod.labels+"}\nspec: {automountServiceAccountToken: false"+pod.spec+", containers: ["+restrictedContainer+"]}\n")
		if (err != nil) != pod.refused || err != nil && (!strings.Contains(err.Error(), `.inject.nametap.dev"`) || !strings.Contains(err.Error(), "nametap-discovery.nametap-system.svc:15017/inject/")) {
			t.Errorf("%+v: %v", pod, err)
		}
	}
}
