package interop

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// The settings of injection that are compared.
var injectModes = map[string]string{
	"rules": "controlPlane: nametap-discovery.nametap-system.svc:15012\nrootCert: nametap-ca-root-cert\nclusterID: c1\n" +
		"settings: {cache-size: 8MiB, drain: 1s, service-account: other}\n",
	"resolv": "mode: resolv\nrootCert: nametap-ca-root-cert\nclusterDomain: corp.example\nnameservers: [10.96.0.10, 'fd00:96::a']\n",
}

// podTable reads testdata/pods.yaml: pods by name.
func podTable(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/pods.yaml")
	if err != nil {
		t.Fatal(err)
	}
	pods := map[string]string{}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var pod corev1.Pod
		if err := yaml.UnmarshalStrict([]byte(document), &pod); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		if pods[pod.Name] != "" {
			t.Fatalf("two pods %s", pod.Name)
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
func verdictOf(tb testing.TB, pod *corev1.Pod, err error) verdict {
	tb.Helper()
	if err != nil {
		_, message, _ := strings.Cut(err.Error(), "nametap cannot be added to this pod: ")
		if message == "" {
			message = err.Error()
		}
		return verdict{Refusal: message}
	}
	text, err := json.Marshal(pod.Spec)
	if err != nil {
		tb.Fatal(err)
	}
	v := verdict{Annotations: pod.Annotations}
	if err := json.Unmarshal(randomName.ReplaceAll(text, []byte("kube-api-access")), &v.Spec); err != nil {
		tb.Fatal(err)
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
	return v
}

// inCluster returns the verdicts of the API server about pods in a namespace that is labelled.
func (c *injectedCluster) inCluster(t *testing.T, pods map[string]string) map[string]verdict {
	t.Helper()
	verdicts := map[string]verdict{}
	for name, text := range pods {
		pod, err := c.dryRun("enabled", text)
		verdicts[name] = verdictOf(t, pod, err)
		if err != nil {
			continue
		}
		// Injected objects stay the same, byte for byte.
		again, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": pod.Name, "labels": pod.Labels, "annotations": pod.Annotations}, "spec": pod.Spec})
		if err != nil {
			t.Fatal(err)
		}
		twice, err := c.dryRun("enabled", string(again)+"\n# kind: Pod\n")
		if diff := cmp.Diff(verdicts[name], verdictOf(t, twice, err)); diff != "" {
			t.Errorf("%s: a second injection (-first +second):\n%s", name, diff)
		}
	}
	return verdicts
}

// offline returns the verdicts of `nametap-discovery inject`, in a cluster that does not inject. Pods are
// in the namespace whose name is in their settings.
func (c *injectedCluster) offline(t *testing.T, pods map[string]string) map[string]verdict {
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
		verdicts[name] = verdictOf(t, pod, err)
	}
	return verdicts
}

// TestInjection injects many pods by `nametap-discovery inject` and by the webhook, in both modes, and compares
// what the API server makes of them.
func TestInjection(t *testing.T) { // I1, I2, I5, I14
	c := newInjectedCluster(t)
	pods := podTable(t)
	want := map[string]map[string]verdict{}
	for mode, settings := range injectModes {
		c.setInjectConfig(settings)
		want[mode] = c.offline(t, pods)
		refused := 0
		for name, v := range want[mode] {
			if v.Refusal != "" {
				refused++
				t.Logf("%s: %s is refused: %s", mode, name, v.Refusal)
			} else if v.Annotations[injectStatus] == "" && !strings.HasPrefix(name, "skipped-") {
				t.Errorf("%s: %s is not injected", mode, name)
			}
		}
		t.Logf("%s: %d pods, %d of them refused", mode, len(pods), refused)
	}
	c.startWebhook("160")
	for mode, settings := range injectModes {
		c.setInjectConfig(settings)
		wait.Until(t, "the settings of mode "+mode+" are in use", func() bool {
			pod, err := c.dryRun("enabled", pods["plain"])
			return cmp.Equal(want[mode]["plain"], verdictOf(t, pod, err))
		})
		for name, got := range c.inCluster(t, pods) {
			if diff := cmp.Diff(want[mode][name], got); diff != "" {
				t.Errorf("mode %s, pod %s (-offline +webhook):\n%s", mode, name, diff)
			}
		}
	}
}

// TestInjectionDecisions checks the table of package inject through the API server.
func TestInjectionDecisions(t *testing.T) { // I3
	c := newInjectedCluster(t)
	for _, namespace := range []string{"kube-system", "kube-public", "kube-node-lease", "nametap-system"} {
		c.mustKubectl("label", "namespace", namespace, injectLabel+"=enabled", "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
	}
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system, labels: {nametap.dev/inject: enabled}}\n")
	for _, namespace := range []string{"kube-system", "kube-public", "kube-node-lease", "nametap-system", "istio-system"} {
		c.account(namespace)
	}
	c.injectConfig()
	c.startWebhook("160")
	source, err := os.ReadFile("../../../inject/decide_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(source), "const decisions = `")
	table, _, _ = strings.Cut(table, "`")
	rows := 0
	for line := range strings.Lines(table) {
		cells := strings.Fields(line)
		if len(cells) < 7 || cells[0] == "namespace" {
			continue
		}
		rows++
		namespace, outcome := cells[0], cells[5]
		if namespace == "shop" {
			namespace = map[string]string{"-": "none"}[cells[1]] + strings.TrimPrefix(cells[1], "-")
		}
		text := "metadata:\n  name: app\n"
		if cells[2] != "-" {
			text += "  labels: {" + injectLabel + ": '" + cells[2] + "'}\n"
		}
		text += map[string]string{
			"-":      "",
			"status": "  annotations: {nametap.dev/status: '{\"mode\":\"rules\",\"initContainers\":{\"nametap\":\"\"},\"volumes\":{\"nametap-state\":\"\"}}'}\n",
			"broken": "  annotations: {nametap.dev/status: '?'}\n",
			"lines":  "  annotations: {nametap.dev/status: \"?\\n\"}\n",
			"mirror": "  annotations: {kubernetes.io/config.mirror: abc}\n",
		}[cells[3]]
		text += "spec:\n  automountServiceAccountToken: false\n  nodeName: node\n  containers: [{name: app, image: app}]\n"
		text += map[string]string{
			"-":            "",
			"hostNetwork":  "  hostNetwork: true\n",
			"windows":      "  os: {name: windows}\n",
			"winselector":  "  nodeSelector: {kubernetes.io/os: windows}\n",
			"winaffinity":  "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}, {key: kubernetes.io/os, operator: In, values: [windows]}]}]}}}\n",
			"betaselector": "  nodeSelector: {beta.kubernetes.io/os: windows}\n",
			"betaaffinity": "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: beta.kubernetes.io/os, operator: In, values: [windows]}]}, {matchExpressions: [{key: kubernetes.io/os, operator: In, values: [windows]}]}]}}}\n",
			"anyaffinity":  "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/os, operator: In, values: [windows]}]}, {matchExpressions: [{key: a, operator: Exists}]}]}}}\n",
			"hand":         "  initContainers: [{name: nametap, image: nametap}]\n",
		}[cells[4]]
		pod, err := c.dryRun(namespace, text)
		got := "skipped"
		switch {
		case err != nil && strings.Contains(err.Error(), "nametap cannot be added to this pod: "):
			got = "refused"
		case err != nil:
			got = err.Error()
		case slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "nametap-token" }):
			got = "injected"
		}
		if reason := strings.Join(cells[6:], " "); got != outcome || outcome == "refused" && !strings.Contains(err.Error(), reason) {
			t.Errorf("%sgot %s, %v", line, got, err)
		}
	}
	t.Logf("%d rows", rows)
	if rows < 30 {
		t.Errorf("%d rows", rows)
	}
}
