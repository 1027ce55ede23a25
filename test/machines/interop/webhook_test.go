package interop

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// bundles returns the fields caBundle of the webhooks.
func (c *cluster) bundles() []string {
	c.tb.Helper()
	var configuration admissionregistrationv1.MutatingWebhookConfiguration
	c.get(hookConfiguration, &configuration)
	var all []string
	for _, hook := range configuration.Webhooks {
		all = append(all, string(hook.ClientConfig.CABundle))
	}
	return all
}

// secret returns the Secret with the certificate.
func (c *cluster) secret() corev1.Secret {
	c.tb.Helper()
	var secret corev1.Secret
	c.get(discoverySecret, &secret)
	return secret
}

// setSecret puts a certificate that is that old into the Secret.
func (c *cluster) setSecret(t *testing.T, age time.Duration) *pki.Certificates {
	t.Helper()
	old, err := pki.NewPolicy([]string{discoveryName}).Renewed(nil, time.Now().Add(-age))
	if err != nil {
		t.Fatal(err)
	}
	data, err := old.Data()
	if err != nil {
		t.Fatal(err)
	}
	encoded := map[string]string{}
	for key, value := range data {
		encoded[key] = base64.StdEncoding.EncodeToString(value)
	}
	patch, err := json.Marshal(map[string]any{"data": encoded})
	if err != nil {
		t.Fatal(err)
	}
	if status, answer := c.try(http.MethodPatch, discoverySecret, "application/merge-patch+json", patch); status != http.StatusOK {
		t.Fatalf("changing the Secret: %d: %s", status, answer)
	}
	return old
}

// TestWebhookBundle changes the caBundle in many ways. Replicas restore it, and programs that apply the
// manifest, as Helm 3 (three-way merge) and Helm 4 (server-side apply) do, have no conflict.
func TestWebhookBundle(t *testing.T) { // I7, I8
	c := newInjectedCluster(t)
	c.startWebhook("160", "170")
	roots := string(c.secret().Data["ca.crt"])
	restored := func(what string) {
		t.Helper()
		begun := time.Now()
		wait.Until(t, what+": the caBundle is restored", func() bool {
			all := c.bundles()
			return len(all) == 2 && all[0] == roots && all[1] == roots
		})
		t.Logf("%s: restored after %v", what, time.Since(begun).Round(time.Millisecond))
	}
	restored("at the start")
	set := func(patch string) {
		t.Helper()
		if status, answer := c.try(http.MethodPatch, hookConfiguration+"?fieldManager=other", "application/json-patch+json", []byte(patch)); status != http.StatusOK {
			t.Fatalf("%d: %s", status, answer)
		}
	}
	set(`[{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]`)
	restored("one removed")
	set(`[{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ""}, {"op": "replace", "path": "/webhooks/1/clientConfig/caBundle", "value": "Cg=="}]`)
	restored("both emptied")
	c.tb.Logf("%s", c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", manifests+"webhook.yaml"))
	restored("server-side apply by the same manager")
	c.tb.Logf("%s", c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", c.write("webhook.yaml", strings.ReplaceAll(c.manifest(t, "webhook.yaml"), "timeoutSeconds: 10", "timeoutSeconds: 9"))))
	restored("an upgrade by server-side apply")
	c.tb.Logf("%s", c.mustKubectl("apply", "-f", manifests+"webhook.yaml"))
	restored("client-side apply")
	c.tb.Logf("%s", c.mustKubectl("replace", "-f", manifests+"webhook.yaml"))
	restored("replace")
	c.mustKubectl("delete", "-f", manifests+"webhook.yaml")
	c.awaitInjection(false)
	c.mustKubectl("create", "-f", manifests+"webhook.yaml")
	restored("deleted and created")

	// No owner of the field keeps a webhook in the list that a manifest does not have any more.
	c.mustKubectl("delete", "-f", manifests+"webhook.yaml")
	c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", manifests+"webhook.yaml")
	restored("created by server-side apply")
	var current admissionregistrationv1.MutatingWebhookConfiguration
	wait.Until(t, "the field has no owner", func() bool {
		c.get(hookConfiguration, &current)
		return !slices.ContainsFunc(current.ManagedFields, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == "nametap-discovery" })
	})
	current.ObjectMeta = metav1.ObjectMeta{Name: current.Name}
	current.TypeMeta = metav1.TypeMeta{APIVersion: "admissionregistration.k8s.io/v1", Kind: "MutatingWebhookConfiguration"}
	current.Webhooks = current.Webhooks[:1]
	current.Webhooks[0].ClientConfig.CABundle = nil
	shorter, err := yaml.Marshal(current)
	if err != nil {
		t.Fatal(err)
	}
	c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", c.write("webhook.yaml", string(shorter)))
	if n := len(c.bundles()); n != 1 {
		t.Errorf("%d webhooks after one was removed", n)
	}
	c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", manifests+"webhook.yaml")
	restored("a webhook added again")

	// The authority is eight of its ten years old, and a second one joins it.
	old := c.setSecret(t, 8*365*24*time.Hour)
	wait.Until(t, "a second authority has joined", func() bool { return strings.Count(string(c.secret().Data["ca.crt"]), "BEGIN") == 2 })
	roots = string(c.secret().Data["ca.crt"])
	if !strings.Contains(roots, strings.TrimSpace(old.Roots())) {
		t.Error("the first authority is lost")
	}
	restored("a second authority")
	c.awaitInjection(true)
	for _, r := range c.replicas {
		if n := r.logged("level=ERROR"); n > 0 {
			t.Errorf("%d errors in %s", n, r.log)
		}
	}
}

// manifest returns a manifest.
func (c *cluster) manifest(t *testing.T, name string) string {
	t.Helper()
	return c.mustKubectl("create", "--dry-run=client", "--output=yaml", "-f", manifests+name)
}

// TestWebhookAway checks which pods can be created while no replica runs, and that the settings are
// read again.
func TestWebhookAway(t *testing.T) { // I7, I9
	c := newInjectedCluster(t)
	c.startWebhook("160")
	r := c.replicas[0]

	// Settings that are wrong are not used.
	c.setInjectConfig("image: other:1\n")
	image := func(want string) func() bool {
		return func() bool {
			pod, err := c.dryRun("enabled", plainPod)
			return err == nil && pod.Spec.InitContainers[0].Image == want
		}
	}
	wait.Until(t, "the settings are in use", image("other:1"))
	c.setInjectConfig("imag: wrong:1\n")
	wait.Until(t, "the error is logged", func() bool { return r.logged("level=ERROR", "inject.yaml", "imag") == 1 })
	if !image("other:1")() || !strings.Contains(c.metrics(r), "nametap_discovery_inject_settings_error 1") {
		t.Error("the previous settings do not stay, or the metric does not say so")
	}
	c.setInjectConfig("image: third:1\n")
	wait.Until(t, "the settings are in use again", image("third:1"))
	if !strings.Contains(c.metrics(r), "nametap_discovery_inject_settings_error 0") {
		t.Error("the metric does not show the end of the error")
	}

	r.end(syscall.SIGKILL)
	for _, pod := range []struct{ namespace, labels, spec string }{
		{"none", "{}", ""}, {"disabled", "{}", ""}, {"enabled", `{nametap.dev/inject: "false"}`, ""}, {"enabled", "{}", ", hostNetwork: true"},
		{"kube-system", `{nametap.dev/inject: "true"}`, ""}, {discoverySystem, `{app: nametap-discovery}`, ""},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: windows}"}, {"enabled", "{}", ", " + affinity(windowsTerm)},
	} {
		text := "metadata: {name: app, labels: " + pod.labels + "}\nspec: {automountServiceAccountToken: false" + pod.spec + ", containers: [" + restrictedContainer + "]}\n"
		if _, err := c.dryRun(pod.namespace, text); err != nil {
			t.Errorf("%+v: %v", pod, err)
		}
	}
	for _, pod := range []struct{ namespace, labels, spec string }{
		{"enabled", "{}", ""}, {"none", `{nametap.dev/inject: "true"}`, ""},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: linux}"}, {"enabled", "{}", ", " + affinity(windowsTerm+", {matchExpressions: [{key: a, operator: Exists}]}")},
	} {
		_, err := c.dryRun(pod.namespace, "metadata: {name: app, labels: "+pod.labels+"}\nspec: {automountServiceAccountToken: false"+pod.spec+", containers: ["+restrictedContainer+"]}\n")
		if err == nil || !strings.Contains(err.Error(), `.inject.nametap.dev"`) || !strings.Contains(err.Error(), "nametap-discovery.nametap-system.svc:15017/inject/") {
			t.Errorf("%+v: %v", pod, err)
		}
		t.Logf("%+v: %v", pod, err)
	}
}

// windowsTerm is a term of an affinity that only nodes with Windows match.
const windowsTerm = "{matchExpressions: [{key: a, operator: Exists}, {key: kubernetes.io/os, operator: In, values: [windows]}]}"

// affinity returns the required node affinity of a pod with these terms.
func affinity(terms string) string {
	return "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" + terms + "]}}}"
}

// restrictedContainer is a container that the Pod Security level restricted admits.
const restrictedContainer = `{name: app, image: app, securityContext: {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}}`

// metrics returns the metrics of a replica.
func (c *cluster) metrics(r replica) string {
	c.tb.Helper()
	response, err := c.client.Get("http://127.0.0.1:" + r.ports[2] + "/metrics")
	if err != nil {
		c.tb.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		c.tb.Fatal(err)
	}
	return string(text)
}

// TestPodSecurity creates pods in namespaces with the levels of Pod Security, in both modes.
func TestPodSecurity(t *testing.T) { // I11
	c := newInjectedCluster(t)
	for _, level := range []string{"privileged", "baseline", "restricted"} {
		c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + level + ", labels: {nametap.dev/inject: enabled, pod-security.kubernetes.io/enforce: " + level + "}}\n")
		c.account(level)
	}
	c.startWebhook("160")
	text := "metadata: {name: app}\nspec: {securityContext: {runAsNonRoot: true}, containers: [" + restrictedContainer + "]}\n"
	for mode, settings := range injectModes {
		c.setInjectConfig(settings)
		wait.Until(t, "the settings are in use", func() bool {
			pod, err := c.dryRun("privileged", text)
			return err == nil && strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"`+mode+`"`)
		})
		for _, level := range []string{"baseline", "restricted"} {
			_, err := c.dryRun(level, text)
			if (err == nil) != (mode == "resolv") || err != nil && !strings.Contains(err.Error(), "violates PodSecurity") {
				t.Errorf("mode %s, level %s: %v", mode, level, err)
			}
		}
	}
}

// TestWebhookRequests sends the webhook what the API server would not send.
func TestWebhookRequests(t *testing.T) { // I10
	c := newInjectedCluster(t)
	c.startWebhook("160")
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(c.secret().Data["ca.crt"])
	client := &http.Client{Timeout: wait.Limit, Transport: &http.Transport{DialContext: c.dial, TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: discoveryName}}}
	defer client.CloseIdleConnections()
	const review = `{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "1", "operation": "CREATE", "namespace": "enabled", "resource": {"version": "v1", "resource": `
	for name, request := range map[string]struct {
		body   string
		status int
		answer string
	}{
		"10 MB":       {strings.Repeat(" ", 10<<20), http.StatusRequestEntityTooLarge, "want at most 4 MiB"},
		"malformed":   {`{"apiVersion": `, http.StatusBadRequest, "want an AdmissionReview in JSON"},
		"wrong type":  {review + `"services"}, "object": {}}}`, http.StatusOK, `"allowed":true`},
		"no pod":      {review + `"pods"}, "object": [1]}}`, http.StatusOK, "not a valid pod"},
		"other kind":  {`{"apiVersion": "v1", "kind": "Pod"}`, http.StatusBadRequest, `kind \"Pod\"`},
		"deep":        {review + `"pods"}, "object": ` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `}}`, http.StatusOK, "a depth of at most"},
		"many values": {review + `"pods"}, "object": {"a": [` + strings.Repeat("1,", 1<<20) + `1]}}}`, http.StatusOK, "at most 20000 values"},
	} {
		response, err := client.Post("https://127.0.0.1:16017/inject/namespace", "application/json", bytes.NewReader([]byte(request.body)))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		answer, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || response.StatusCode != request.status || !strings.Contains(strings.ReplaceAll(string(answer), `"Pod"`, `\"Pod\"`), request.answer) {
			t.Errorf("%s: %d %.300s, %v", name, response.StatusCode, answer, err)
		}
	}
	c.awaitInjection(true)
	if text := c.metrics(c.replicas[0]); !strings.Contains(text, `nametap_discovery_inject_requests_total{outcome="invalid"} 6`) {
		t.Errorf("the metrics do not count the requests: %s", text)
	}
	c.floods(client, review)
	if strings.Contains(c.replicas[0].text(), "panic") {
		t.Errorf("a panic, see %s", c.replicas[0].log)
	}
}

// floods sends the webhook many questions at once that need much memory or much time, of pods that are not
// the API server. It answers others meanwhile, and stays within the memory of the container.
func (c *injectedCluster) floods(client *http.Client, review string) {
	c.tb.Helper()
	const path = "https://127.0.0.1:16017/inject/namespace"
	pod := review + `"pods"}, "object": {"spec": {"containers": [{"name": "app", "args": [""]}]}}`
	silent := make(chan struct{}) // bodies that do not come
	for name, body := range map[string]func() io.Reader{
		"the largest pods":   bodies(review + `"pods"}, "object": {"metadata": {"annotations": {"a": "` + strings.Repeat("<", 3<<20) + `"}}, "spec": {"containers": [{"name": "app", "args": [` + strings.Repeat(`"", `, 19_900) + `""]}]}}}}`),
		"many other values":  bodies(pod + `, "userInfo": {"extra": {"a": [` + strings.Repeat(`"",`, 1<<20) + `""]}}}}`),
		"bodies without end": func() io.Reader { return io.MultiReader(strings.NewReader(pod), waiting(silent)) },
	} {
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() {
				response, err := client.Post(path, "application/json", body())
				if err != nil {
					return // it was given up
				}
				defer response.Body.Close()
				_, _ = io.Copy(io.Discard, response.Body)
			})
		}
		begun := time.Now()
		c.awaitInjection(true)
		c.tb.Logf("%s, 50 at once: another pod is injected after %v", name, time.Since(begun).Round(time.Millisecond))
		if name == "bodies without end" {
			close(silent)
		}
		group.Wait()
		used := c.replicas[0].memory()
		c.tb.Logf("%s, 50 at once: %v", name, used)
		if used.peak > 256<<10 {
			c.tb.Errorf("%s: a peak of %d KiB, and half of the memory of the container is 256 MiB", name, used.peak)
		}
	}
}

// bodies returns a function that returns readers of a text.
func bodies(text string) func() io.Reader {
	return func() io.Reader { return strings.NewReader(text) }
}

// waiting is a body that does not come until the channel is closed.
type waiting chan struct{}

func (w waiting) Read([]byte) (int, error) {
	<-w
	return 0, io.EOF
}
