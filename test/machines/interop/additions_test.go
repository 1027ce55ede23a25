package interop

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// mirror is the registry of the webhook that rewrites images.
const mirror = "mirror.example/"

// A jsonPatch is one operation of a patch.
type jsonPatch struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// rewriteImages answers a question of the API server: all images come from the mirror.
func rewriteImages(to http.ResponseWriter, r *http.Request) {
	var review admissionv1.AdmissionReview
	var pod corev1.Pod
	err := json.NewDecoder(r.Body).Decode(&review)
	if err == nil {
		err = json.Unmarshal(review.Request.Object.Raw, &pod)
	}
	var patch []jsonPatch
	for field, list := range map[string][]corev1.Container{"initContainers": pod.Spec.InitContainers, "containers": pod.Spec.Containers} {
		for i, c := range list {
			if !strings.HasPrefix(c.Image, mirror) {
				patch = append(patch, jsonPatch{"replace", fmt.Sprintf("/spec/%s/%d/image", field, i), mirror + c.Image})
			}
		}
	}
	response := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	if len(patch) > 0 {
		kind := admissionv1.PatchTypeJSONPatch
		response.PatchType = &kind
		response.Patch, err = json.Marshal(patch)
	}
	if err != nil {
		http.Error(to, err.Error(), http.StatusBadRequest)
		return
	}
	review.Request, review.Response = nil, response
	_ = json.NewEncoder(to).Encode(review) // the test notices a missing answer
}

// startMirror serves a webhook that rewrites images, which the API server asks in the order of the names of
// webhooks.
func (c *injectedCluster) startMirror(name, reinvocation string) {
	c.tb.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(rewriteImages))
	_ = server.Listener.Close() // of another network
	c.Run(func() {
		ln, err := (&net.ListenConfig{}).Listen(c.tb.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			c.tb.Error(err)
		}
		server.Listener = ln
	})
	server.StartTLS()
	c.tb.Cleanup(server.Close)
	bundle := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	c.apply("apiVersion: admissionregistration.k8s.io/v1\nkind: MutatingWebhookConfiguration\nmetadata: {name: " + name + "}\nwebhooks:\n" +
		"  - {name: images.example.com, admissionReviewVersions: [v1], sideEffects: None, reinvocationPolicy: " + reinvocation + ",\n" +
		"     clientConfig: {url: '" + server.URL + "', caBundle: " + bundle + "}, namespaceSelector: {matchLabels: {images: mirror}},\n" +
		"     rules: [{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}]}\n")
}

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

// TestAdditionsOfCluster creates pods where LimitRanges, quotas on limits, AlwaysPullImages, a webhook that
// rewrites images, and Pod Security have their say. Pods that are injected offline, by the webhook, or by both, are
// accepted, and the same.
func TestAdditionsOfCluster(t *testing.T) { // I1, I2
	c := newInjectedCluster(t, "--enable-admission-plugins=AlwaysPullImages")
	for name, label := range map[string]string{"offline": "disabled", "webhook": "enabled"} {
		for _, level := range []string{"privileged", "restricted"} {
			c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %[1]s-%[3]s, labels: {images: mirror, nametap.dev/inject: %[2]s, pod-security.kubernetes.io/enforce: %[3]s}}\n", name, label, level))
			c.account(name + "-" + level)
			c.mustKubectl("--namespace", name+"-"+level, "apply", "-f", c.write("limits.yaml", limits))
		}
	}
	c.injectConfig()
	c.startWebhook("160")
	restricted := map[string]string{"restricted": "apiVersion: v1\nkind: Pod\nmetadata: {name: app}\nspec: {securityContext: {runAsNonRoot: true}, containers: [" + restrictedContainer + "]}\n"}
	for _, order := range []struct{ name, reinvocation string }{{"a-images", "IfNeeded"}, {"z-images", "Never"}} {
		c.startMirror(order.name, order.reinvocation)
		wait.Until(t, "the images come from the mirror", func() bool {
			pod, err := c.dryRun("offline-privileged", plainPod)
			return err == nil && strings.HasPrefix(pod.Spec.Containers[0].Image, mirror)
		})
		for mode := range injectModes {
			t.Run(order.name+"/"+mode, func(t *testing.T) {
				c.compareAdditions(t, mode, "privileged", podTable(t))
				if mode == "resolv" {
					c.compareAdditions(t, mode, "restricted", restricted)
				}
			})
		}
		c.mustKubectl("delete", "mutatingwebhookconfiguration", order.name)
	}
}

// compareAdditions compares pods that are injected offline, by the webhook, and by both.
func (c *injectedCluster) compareAdditions(t *testing.T, mode, level string, pods map[string]string) {
	t.Helper()
	settings := injectModes[mode]
	c.setInjectConfig(settings)
	injected, err := c.inject("webhook-privileged", "apiVersion: v1\nkind: Pod\n"+plainPod)
	if err != nil {
		t.Fatal(err)
	}
	offline, err := c.dryRun("offline-privileged", injected)
	want := additionsVerdict(t, offline, err)
	wait.Until(t, "the settings of mode "+mode+" are in use", func() bool {
		pod, err := c.dryRun("webhook-privileged", plainPod)
		return cmp.Equal(want, additionsVerdict(t, pod, err))
	})
	accepted := 0
	for name, text := range pods {
		injected, err := c.inject("webhook-"+level, text)
		if err != nil || strings.Contains(text, injectLabel) {
			continue // TestInjection has the reasons; a pod with the label is not offline
		}
		accepted++
		offline, err := c.dryRun("offline-"+level, injected)
		want := additionsVerdict(t, offline, err)
		if err != nil {
			t.Errorf("%s, offline: %v", name, err)
			continue
		}
		for _, container := range offline.Spec.InitContainers {
			if container.ImagePullPolicy != corev1.PullAlways || !strings.HasPrefix(container.Image, mirror) || container.Resources.Limits.Cpu().IsZero() {
				t.Errorf("%s: the cluster has not changed %+v", name, container)
			}
		}
		for way, text := range map[string]string{"webhook": text, "both": injected} {
			pod, err := c.dryRun("webhook-"+level, text)
			if diff := cmp.Diff(want, additionsVerdict(t, pod, err)); diff != "" {
				t.Errorf("%s (-offline +%s):\n%s", name, way, diff)
			}
		}
		other, err := c.injectWith(strings.Replace(settings, "cache-size: 8MiB", "ttl: 1m", 1)+"image: other:1\n", "webhook-"+level, text)
		if err != nil {
			t.Fatal(err)
		}
		pod, err := c.dryRun("webhook-"+level, other)
		if diff := cmp.Diff(want, additionsVerdict(t, pod, err)); diff != "" {
			t.Errorf("%s, offline with other settings, and the webhook (-offline +both):\n%s", name, diff)
		}
	}
	t.Logf("%d pods", accepted)
	if accepted == 0 {
		t.Error("no pod is injected")
	}
}

// additionsVerdict is verdictOf without the annotation in which LimitRanger lists what it has set the last time.
func additionsVerdict(t *testing.T, pod *corev1.Pod, err error) verdict {
	t.Helper()
	v := verdictOf(t, pod, err)
	delete(v.Annotations, "kubernetes.io/limit-ranger")
	return v
}
