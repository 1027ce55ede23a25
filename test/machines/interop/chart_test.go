package interop

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// TestChart installs, upgrades and uninstalls the chart with Helm 3 and 4, and checks that pods and the API server trust
// nametap-discovery before and after the upgrade, and that nothing is left after the commands of docs/chart.md.
func TestChart(t *testing.T) { // D69, P9
	c := lab.NewCluster(t)
	c.Boot()
	c.Kubectl("create", "namespace", "other")
	// Helm leaves custom resource definitions, and `kubectl delete` removes them with their objects.
	c.Kubectl("create", "-f", manifest("crds.yaml"))
	for _, by := range []chartVersions{
		{"helm3", chartDir, "helm4", nil},
		{"helm4", chartDir, "helm4", nil},
		{"helm3", chartOfReplicas(t), "helm3", nil},
		{"helm4", chartOfReplicas(t), "helm4", nil},
		{"helm3", chartOfReplicas(t), "helm4", nil},
	} {
		name := by.install + " then " + by.upgrade
		if by.chart != chartDir {
			name += " from an earlier chart"
		}
		t.Run(name, func(t *testing.T) { testChart(t, c.In(t), by) })
	}
}

// The chart, and the flags of a release.
var chartDir = filepath.Join(lab.Repository(), "deploy/chart")

var releaseFlags = []string{"--namespace", discoverySystem}

// chartVersions are the version of Helm that installs a chart, that chart, and the version of Helm that upgrades it.
type chartVersions struct {
	install, chart, upgrade string
	flags                   []string // of the upgrade
}

// chartOfReplicas returns the directory of the last chart with which replicas made the certificate.
func chartOfReplicas(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	command := exec.CommandContext(t.Context(), "sh", "-euc", `cd ../../..
commit=$(git log --format=%h -S--tls-secret= -- deploy/chart/templates/discovery.yaml | head -1)
git archive "$commit^" deploy/chart | tar --extract --directory="$1"`, "sh", dir)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	return filepath.Join(dir, "deploy/chart")
}

// madeByReplicas makes what replicas of the earlier chart have made: the certificate and its authority in one Secret, the
// root certificate in a namespace, and the caBundle. It returns the root certificate.
func madeByReplicas(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	output, err := exec.Command(lab.Program(t, "nametap-discovery"), "certificates", "--pods-in", "other").Output()
	if err != nil {
		t.Fatal(err)
	}
	data := map[string][]byte{}
	for _, o := range c.Parse(string(output)) {
		if o.Kind != "Secret" {
			c.Apply(o.Text)
			continue
		}
		var secret corev1.Secret
		if err := yaml.Unmarshal([]byte(o.Text), &secret); err != nil {
			t.Fatal(err)
		}
		if secret.Name == "nametap-discovery-ca" {
			data["ca.crt"], data["ca.key"] = secret.Data["tls.crt"], secret.Data["tls.key"]
		} else {
			data["tls.crt"], data["tls.key"] = secret.Data["tls.crt"], secret.Data["tls.key"]
		}
	}
	patch := func(path, kind string, change any) {
		t.Helper()
		text, err := json.Marshal(change)
		if err != nil {
			t.Fatal(err)
		}
		if status, answer := c.Request(http.MethodPatch, path+"?fieldManager=nametap-discovery", kind, text); status != http.StatusOK {
			t.Fatalf("%s: %d: %s", path, status, answer)
		}
	}
	patch(discoverySecrets+"nametap-discovery-tls", "application/merge-patch+json", map[string]any{"data": data})
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value any    `json:"value,omitempty"`
	}
	patch(hookConfiguration, "application/json-patch+json", []operation{
		{"add", "/webhooks/0/clientConfig/caBundle", data["ca.crt"]}, {"add", "/webhooks/1/clientConfig/caBundle", data["ca.crt"]},
	})
	// Replicas leave no owner of the field.
	var hooks admissionregistrationv1.MutatingWebhookConfiguration
	c.Get(hookConfiguration, &hooks)
	owner := slices.IndexFunc(hooks.ManagedFields, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == "nametap-discovery" })
	patch(hookConfiguration, "application/json-patch+json", []operation{{Op: "remove", Path: "/metadata/managedFields/" + strconv.Itoa(owner)}})
	return string(data["ca.crt"])
}

// serves checks that pods and an API server which trust a root certificate accept nametap-discovery, and returns its
// certificate.
func serves(t *testing.T, c *lab.Cluster, root string) string {
	t.Helper()
	data := secret(c, "nametap-discovery-cert")
	pair, err := tls.X509KeyPair(data["tls.crt"], data["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(root))
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: discoveryName}); err != nil {
		t.Error(err)
	}
	var settings corev1.ConfigMap
	c.Get("/api/v1/namespaces/"+discoverySystem+"/configmaps/nametap-inject", &settings)
	if diff := cmp.Diff([]string{root, root, root, root}, append(bundles(c), string(data["ca.crt"]), settings.Data["root-cert.pem"])); diff != "" {
		t.Errorf("root certificates (-want +got):\n%s", diff)
	}
	return string(data["tls.crt"])
}

func testChart(t *testing.T, c *lab.Cluster, by chartVersions) {
	install, upgrade := by.install, by.upgrade
	before := everything(c)
	with := func(command []string, more ...string) []string { return slices.Concat(command, releaseFlags, more) }
	if install == "helm3" {
		c.Helm(install, with([]string{"install", "nametap", by.chart}, "--dry-run=server", "--create-namespace")...)
	}
	c.Helm(install, with([]string{"install", "nametap", by.chart}, "--create-namespace", "--set", "injection.webhook=true")...)
	deploymentHas(c, 2, "--grpc-addr=:15010")
	root, certificate := "", ""
	if by.chart == chartDir {
		root = string(secret(c, "nametap-discovery-ca")["tls.crt"])
		certificate = serves(t, c, root)
	} else {
		root = madeByReplicas(t, c)
	}
	// Another program may change what the chart has no value for.
	c.Kubectl("annotate", "deployment/nametap-discovery", "--namespace", discoverySystem, "example.com/note=kept")
	c.Helm(upgrade, with(append([]string{"upgrade", "nametap", chartDir}, by.flags...), "--set", "injection.webhook=true,injection.ignoredNamespaces={other},discovery.replicas=3,discovery.plaintext=false")...)
	if serves(t, c, root) == certificate {
		t.Error("the upgrade has not renewed the certificate")
	}
	deploymentHas(c, 3, "--tls-addr=:15012")
	var d appsv1.Deployment
	c.Get(deploymentPath, &d)
	if d.Annotations["example.com/note"] != "kept" || slices.Contains(d.Spec.Template.Spec.Containers[0].Args, "--grpc-addr=:15010") {
		t.Errorf("after the upgrade: %v, %v", d.Annotations, d.Spec.Template.Spec.Containers[0].Args)
	}
	// A key that is unknown changes nothing.
	if output, err := c.TryHelm(upgrade, with([]string{"upgrade", "nametap", chartDir}, "--set", "discovery.replica=5")...); err == nil || !strings.Contains(output, "replica") {
		t.Errorf("an unknown key: %v, %s", err, output)
	}
	deploymentHas(c, 3, "--tls-addr=:15012")
	c.Helm(upgrade, with([]string{"uninstall", "nametap"}, "--wait")...)
	if by.chart != chartDir {
		c.Kubectl("delete", "configmap", "--namespace=other", rootConfigMap)
	}
	for _, command := range uninstallCommands(t) {
		c.Kubectl(strings.Fields(strings.TrimPrefix(command, "kubectl "))...)
	}
	var after map[string]bool
	wait.Until(t, "all objects are removed", func() bool {
		after = everything(c)
		return maps.Equal(before, after)
	})
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("objects before (-) and after (+):\n%s", diff)
	}
}

const deploymentPath = "/apis/apps/v1/namespaces/" + discoverySystem + "/deployments/nametap-discovery"

// deploymentHas checks the replicas and an argument of nametap-discovery.
func deploymentHas(c *lab.Cluster, replicas int32, arg string) {
	c.TB.Helper()
	var d appsv1.Deployment
	c.Get(deploymentPath, &d)
	if args := d.Spec.Template.Spec.Containers[0].Args; *d.Spec.Replicas != replicas || !slices.Contains(args, arg) {
		c.TB.Errorf("%d replicas with %q, want %d with %s", *d.Spec.Replicas, args, replicas, arg)
	}
}

// uninstallCommands returns the commands of docs/chart.md that remove what Helm leaves, except the
// commands for the custom resource definitions.
func uninstallCommands(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/chart.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Uninstall\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var commands []string
	for line := range strings.Lines(section) {
		command, _, _ := strings.Cut(line, " #")
		command, ok := strings.CutPrefix(strings.TrimSpace(command), "kubectl ")
		if ok && strings.HasPrefix(line, "    ") && !strings.Contains(command, "crds.yaml") {
			commands = append(commands, "kubectl "+command)
		}
	}
	if len(commands) != 1 {
		t.Fatalf("docs/chart.md has the commands %q", commands)
	}
	return commands
}

// everything returns the names of all objects of the cluster, except events.
func everything(c *lab.Cluster) map[string]bool {
	c.TB.Helper()
	kinds := slices.DeleteFunc(strings.Fields(c.Kubectl("api-resources", "--verbs=list", "-o", "name")), func(kind string) bool {
		return strings.HasPrefix(kind, "events") || strings.HasPrefix(kind, "componentstatuses")
	})
	all := map[string]bool{}
	output := c.Kubectl("get", strings.Join(kinds, ","), "--all-namespaces", "--ignore-not-found", "--no-headers",
		"-o", `custom-columns=K:.kind,NS:.metadata.namespace,N:.metadata.name`)
	for line := range strings.Lines(output) {
		if fields := strings.Fields(line); len(fields) == 3 {
			all[strings.Join(fields, " ")] = true
		}
	}
	if len(all) < 50 {
		c.TB.Fatalf("kubectl lists only %d objects:\n%s", len(all), output)
	}
	return all
}
