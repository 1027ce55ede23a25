package interop

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// hookConfiguration is the path of the object of webhook.yaml.
const hookConfiguration = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/nametap-inject"

// The label and the annotation of injection.
const (
	injectLabel  = "nametap.dev/inject"
	injectStatus = "nametap.dev/status"
)

// An injectedCluster has nametap-discovery as the manifests have it, and namespaces that are labelled:
// enabled, disabled, true and none.
type injectedCluster struct {
	*cluster
	args     []string // of nametap-discovery
	replicas []replica
}

// injectConfig returns the file with the settings of injection, and makes it if it is missing.
func (c *cluster) injectConfig() string {
	c.tb.Helper()
	return c.setInjectConfig("controlPlane: nametap-discovery.nametap-system.svc:15012\nrootCert: nametap-ca-root-cert\n")
}

// setInjectConfig changes the settings of injection.
func (c *cluster) setInjectConfig(text string) string {
	c.tb.Helper()
	return c.write("inject.yaml", text)
}

// newInjectedCluster starts a cluster with the objects of discovery.yaml and namespaces. There is no
// webhook yet. flags are more flags of the API server. The API server connects to the endpoints of Services by itself, because there is no
// kube-proxy.
func newInjectedCluster(t *testing.T, flags ...string) *injectedCluster {
	t.Helper()
	c := &injectedCluster{cluster: prepareCluster(t), args: readManifest(t).args}
	c.boot(append(flags, "--enable-aggregator-routing=true")...)
	c.mustKubectl("apply", "-f", manifests+"discovery.yaml")
	for _, label := range []string{"enabled", "disabled", "true"} {
		c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %[1]q, labels: {%[2]s: %[1]q}}\n", label, injectLabel))
	}
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: none}\n")
	for _, namespace := range []string{"enabled", "disabled", "true", "none"} {
		c.account(namespace)
	}
	return c
}

// startReplica starts a replica, which is not an endpoint of the Service yet.
func (c *injectedCluster) startReplica(digits string) {
	c.tb.Helper()
	c.replicas = append(c.replicas, c.replica(c.args, digits))
}

// startWebhook starts replicas, makes them the endpoints of the Service and applies webhook.yaml. It
// returns when a pod is injected.
func (c *injectedCluster) startWebhook(digits ...string) {
	c.tb.Helper()
	for _, d := range digits {
		c.startReplica(d)
	}
	c.endpoints(digits...)
	c.mustKubectl("apply", "--server-side", "--field-manager=helm", "-f", manifests+"webhook.yaml")
	c.awaitInjection(true)
}

// awaitInjection waits until a pod is injected, or not any more.
func (c *injectedCluster) awaitInjection(want bool) {
	c.tb.Helper()
	wait.Until(c.tb, fmt.Sprintf("pods are injected: %v", want), func() bool {
		pod, err := c.dryRun("enabled", plainPod)
		return err == nil && (pod.Annotations[injectStatus] != "") == want
	})
}

// endpoints makes replicas the endpoints of the Service, as Kubernetes does with pods that are ready.
func (c *injectedCluster) endpoints(digits ...string) {
	c.tb.Helper()
	for _, d := range []string{"160", "170", "180", "190"} {
		slice := fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
			"metadata: {name: replica-%s, namespace: %s, labels: {kubernetes.io/service-name: nametap-discovery, endpointslice.kubernetes.io/managed-by: interop}}\n"+
			"ports: [{name: https-inject, port: %s17, protocol: TCP}]\n", d, discoverySystem, d)
		if slices.Contains(digits, d) {
			c.apply(slice + "endpoints: [{addresses: [172.31.0.1], conditions: {ready: true}}]\n")
		} else {
			c.apply(slice + "endpoints: []\n")
		}
	}
}

// plainPod is a pod of an application.
const plainPod = "metadata: {name: app}\nspec:\n  automountServiceAccountToken: false\n  containers: [{name: app, image: app}]\n"

// A refusal is why the API server does not create a pod.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return fmt.Sprintf("status %d: %s", r.status, r.message) }

// dryRun returns a pod as the API server would create it.
func (c *injectedCluster) dryRun(namespace, text string) (*corev1.Pod, error) {
	c.tb.Helper()
	return c.createPod(namespace, text, "?dryRun=All")
}

// createPod creates a pod, and returns what has become of it. Only the test's goroutine may call it.
func (c *injectedCluster) createPod(namespace, text, query string) (*corev1.Pod, error) {
	c.tb.Helper()
	if !strings.Contains(text, "kind: Pod\n") {
		text = "apiVersion: v1\nkind: Pod\n" + text
	}
	body, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		c.tb.Fatalf("%v\n%s", err, text)
	}
	status, answer := c.try(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods"+query, "application/json", body)
	if status != http.StatusCreated {
		var why struct{ Message string }
		_ = json.Unmarshal(answer, &why)
		return nil, &refusal{status, why.Message}
	}
	pod := new(corev1.Pod)
	if err := json.Unmarshal(answer, pod); err != nil {
		c.tb.Fatal(err)
	}
	return pod, nil
}

// inject runs `nametap-discovery inject` on a pod, as for a namespace that is labelled, with the settings of the
// webhook.
func (c *injectedCluster) inject(namespace, text string) (string, error) {
	c.tb.Helper()
	return c.injectFrom(c.path("inject.yaml"), namespace, text)
}

// injectWith is inject with other settings.
func (c *injectedCluster) injectWith(settings, namespace, text string) (string, error) {
	c.tb.Helper()
	return c.injectFrom(c.write("other.yaml", settings), namespace, text)
}

// injectFrom is inject with the settings of a file.
func (c *injectedCluster) injectFrom(file, namespace, text string) (string, error) {
	c.tb.Helper()
	cmd := exec.Command(discoveryBinary, "inject", "--config", file, "--namespace", namespace)
	cmd.Stdin = strings.NewReader(text)
	var errors strings.Builder
	cmd.Stderr = &errors
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, errors.String())
	}
	return string(output), nil
}
