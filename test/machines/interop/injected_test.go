package interop

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// The names in discovery.yaml and webhook.yaml, and of what injection adds.
const (
	discoverySystem   = "nametap-system"
	discoverySecrets  = "/api/v1/namespaces/" + discoverySystem + "/secrets/"
	discoveryName     = "nametap-discovery." + discoverySystem + ".svc"
	rootConfigMap     = "nametap-ca-root-cert"
	hookConfiguration = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/nametap-inject"
	injectLabel       = "nametap.dev/inject"
	injectStatus      = "nametap.dev/status"
	injectSettings    = "controlPlane: nametap-discovery.nametap-system.svc:15012\nrootCert: nametap-ca-root-cert\n"
)

// manifest returns the path of a manifest.
func manifest(name string) string { return filepath.Join(lab.Repository(), "deploy/kubernetes", name) }

// readManifests returns the rules of all roles in discovery.yaml and webhook.yaml, and the arguments of nametap-discovery.
func readManifests(c *lab.Cluster) (rules []rbacv1.PolicyRule, args []string) {
	c.TB.Helper()
	for _, o := range c.Parse(c.Read(manifest("discovery.yaml")) + "\n---\n" + c.Read(manifest("webhook.yaml"))) {
		var role rbacv1.Role // a ClusterRole has the same fields
		var deployment appsv1.Deployment
		var err error
		switch o.Kind {
		case "Role", "ClusterRole":
			err = yaml.Unmarshal([]byte(o.Text), &role)
			rules = append(rules, role.Rules...)
		case "Deployment":
			err = yaml.Unmarshal([]byte(o.Text), &deployment)
			args = deployment.Spec.Template.Spec.Containers[0].Args
		}
		if err != nil {
			c.TB.Fatalf("%v\n%s", err, o.Text)
		}
	}
	if len(rules) == 0 || len(args) == 0 {
		c.TB.Fatalf("the manifests have the rules %v and the arguments %q", rules, args)
	}
	return rules, args
}

// A replica is a nametap-discovery with the rights and the arguments of the manifest.
type replica struct {
	*lab.Process
	tls, status string // ports
}

// startReplica starts a nametap-discovery with an access of its service account, and returns when it is ready. Replicas
// differ in their ports, which begin with digits.
func startReplica(c *lab.Cluster, args []string, digits string) replica {
	c.TB.Helper()
	access := c.Write("kubeconfig-"+digits, strings.ReplaceAll(c.Read("kubeconfig"), "{token: "+lab.AdminToken+"}", "{token: "+token(c, discoverySystem, "nametap-discovery")+"}"))
	if _, err := os.Stat(c.Path("inject.yaml")); err != nil {
		c.Write("inject.yaml", injectSettings)
	}
	r := replica{tls: digits + "12", status: "127.0.0.1:" + digits + "14"}
	// As in a pod, where it serves on for a while at its end.
	r.Process = c.Discovery("discovery-"+digits, r.status, []string{"KUBERNETES_SERVICE_HOST=" + lab.ClusterAddr}, append(slices.Clone(args),
		"--kubeconfig", access, "--http-addr", r.status, "--tls-addr", ":"+r.tls, "--grpc-addr", ":"+digits+"10",
		"--tls-cert", c.Path("tls.crt"), "--tls-key", c.Path("tls.key"), "--inject-addr", ":"+digits+"17", "--inject-config", c.Path("inject.yaml"))...)
	return r
}

// An injectedCluster has nametap-discovery as the manifests have it, and namespaces that are labelled: enabled, disabled and
// none. The API server connects to the endpoints of Services by itself, because there is no kube-proxy.
type injectedCluster struct {
	*lab.Cluster
	args     []string // of nametap-discovery
	replicas []replica
}

// newInjectedCluster starts a cluster with the objects of discovery.yaml. There is no webhook yet.
func newInjectedCluster(t *testing.T, flags ...string) *injectedCluster {
	t.Helper()
	c := &injectedCluster{Cluster: lab.NewCluster(t)}
	c.Boot(append(flags, "--enable-aggregator-routing=true")...)
	c.Kubectl("apply", "-f", manifest("discovery.yaml"))
	certify(c.Cluster)
	_, c.args = readManifests(c.Cluster)
	c.Write("inject.yaml", injectSettings)
	for name, labels := range map[string]string{"enabled": injectLabel + ": enabled", "disabled": injectLabel + ": disabled", "none": ""} {
		c.namespace(name, labels, "")
	}
	return c
}

// in returns the cluster for a subtest.
func (c *injectedCluster) in(t *testing.T) *injectedCluster {
	t.Helper()
	in := *c
	in.Cluster = c.In(t)
	return &in
}

// namespace makes or changes a namespace, and waits for its service account.
func (c *injectedCluster) namespace(name, labels, annotations string) {
	c.TB.Helper()
	c.Apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {%s}, annotations: {%s}}\n", name, labels, annotations))
	account(c.Cluster, name, "default")
}

// startWebhook starts replicas, makes them the endpoints of the Service and applies webhook.yaml. It returns when a pod is
// injected.
func (c *injectedCluster) startWebhook(digits ...string) {
	c.TB.Helper()
	for _, d := range digits {
		c.replicas = append(c.replicas, startReplica(c.Cluster, c.args, d))
	}
	c.endpoints(digits...)
	c.Kubectl("apply", "--server-side", "--field-manager=helm", "-f", manifest("webhook.yaml"))
	certify(c.Cluster, "--webhook")
	c.awaitInjection(true)
	// Applying the manifest again leaves the caBundle.
	before := bundles(c.Cluster)
	c.Kubectl("apply", "--server-side", "--field-manager=helm", "-f", manifest("webhook.yaml"))
	if after := bundles(c.Cluster); before[0] == "" || !slices.Equal(before, after) {
		c.TB.Errorf("the caBundle is %q, and was %q", after, before)
	}
}

// awaitInjection waits until a pod is injected, or not any more.
func (c *injectedCluster) awaitInjection(want bool) {
	c.TB.Helper()
	wait.Until(c.TB, fmt.Sprintf("pods are injected: %v", want), func() bool {
		pod, err := c.create("enabled", plainPod, "?dryRun=All")
		return err == nil && (pod.Annotations[injectStatus] != "") == want
	})
}

// awaitSettings waits until pods are injected with the settings in inject.yaml, in which sign shows.
func (c *injectedCluster) awaitSettings(settings string, inUse func(pod *corev1.Pod) bool) {
	c.TB.Helper()
	c.Write("inject.yaml", settings)
	wait.Until(c.TB, "the settings are in use", func() bool {
		pod, err := c.create("enabled", plainPod, "?dryRun=All")
		return err == nil && inUse(pod)
	})
}

// endpoints makes replicas the endpoints of the Service, as Kubernetes does with pods that are ready.
func (c *injectedCluster) endpoints(digits ...string) {
	c.TB.Helper()
	for _, d := range []string{"160", "170", "180", "190"} {
		endpoints := "[]"
		if slices.Contains(digits, d) {
			endpoints = "[{addresses: [" + lab.ClusterAddr + "], conditions: {ready: true}}]"
		}
		c.Apply(fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
			"metadata: {name: replica-%s, namespace: %s, labels: {kubernetes.io/service-name: nametap-discovery, endpointslice.kubernetes.io/managed-by: interop}}\n"+
			"ports: [{name: https-inject, port: %s17, protocol: TCP}]\nendpoints: %s\n", d, discoverySystem, d, endpoints))
	}
}

// plainPod is a pod of an application, and restrictedContainer a container that the Pod Security level restricted admits.
const (
	plainPod            = "metadata: {name: app}\nspec:\n  automountServiceAccountToken: false\n  containers: [{name: app, image: app}]\n"
	restrictedContainer = `{name: app, image: app, securityContext: {runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}}`
)

// dryRun returns a pod as the API server would create it.
func (c *injectedCluster) dryRun(namespace, text string) (*corev1.Pod, error) {
	return c.create(namespace, text, "?dryRun=All")
}

// create creates a pod, and returns what has become of it.
func (c *injectedCluster) create(namespace, text, query string) (*corev1.Pod, error) {
	if !strings.Contains(text, "kind: Pod\n") {
		text = "apiVersion: v1\nkind: Pod\n" + text
	}
	body, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		return nil, err
	}
	pod := new(corev1.Pod)
	if err := c.Do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods"+query, json.RawMessage(body), pod); err != nil {
		return nil, err
	}
	return pod, nil
}

// bundles returns the fields caBundle of the webhooks.
func bundles(c *lab.Cluster) []string {
	c.TB.Helper()
	var configuration admissionregistrationv1.MutatingWebhookConfiguration
	c.Get(hookConfiguration, &configuration)
	var all []string
	for _, hook := range configuration.Webhooks {
		all = append(all, string(hook.ClientConfig.CABundle))
	}
	return all
}

// secret returns the data of a Secret of nametap-discovery; nil without it.
func secret(c *lab.Cluster, name string) map[string][]byte {
	c.TB.Helper()
	var secret corev1.Secret
	if c.Do(http.MethodGet, discoverySecrets+name, nil, &secret) != nil {
		return nil
	}
	return secret.Data
}

// certify runs `nametap-discovery certificates` with more flags, of the authority that there is, and writes the files that
// kubelet would.
func certify(c *lab.Cluster, flags ...string) {
	c.TB.Helper()
	if secret(c, "nametap-discovery-ca") != nil {
		file := c.Write("ca.yaml", c.Kubectl("get", "secret", "nametap-discovery-ca", "--namespace", discoverySystem, "-o", "yaml"))
		flags = append(flags, "--authority", file)
	}
	output, err := exec.Command(lab.Program(c.TB, "nametap-discovery"), append([]string{"certificates"}, flags...)...).Output()
	if err != nil {
		c.TB.Fatal(err)
	}
	c.Kubectl("apply", "--server-side", "-f", c.Write("certificates.yaml", string(output)))
	for name, text := range secret(c, "nametap-discovery-cert") {
		c.Write(name, string(text))
	}
}
