package interop

import (
	"crypto/tls"
	"crypto/x509"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// TestChart installs, upgrades and uninstalls the chart with Helm 3 and 4, and checks that pods and the API server trust
// nametap-discovery before and after the upgrade, and that nothing is left after the commands of docs/chart.md.
func TestChart(t *testing.T) { // D69, P9
	c := lab.NewCluster(t)
	c.Boot()
	// Helm leaves custom resource definitions, and `kubectl delete` removes them with their objects.
	c.Kubectl("create", "-f", manifest("crds.yaml"))
	for _, by := range []chartVersions{{"helm3", "helm4"}, {"helm4", "helm4"}, {"helm3", "helm3"}} {
		t.Run(by.install+" then "+by.upgrade, func(t *testing.T) { testChart(t, c.In(t), by) })
	}
}

// The chart, and the flags of a release.
var chartDir = filepath.Join(lab.Repository(), "deploy/chart")

var releaseFlags = []string{"--namespace", discoverySystem}

// chartVersions are the version of Helm that installs the chart, and the one that upgrades it.
type chartVersions struct{ install, upgrade string }

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
		c.Helm(install, with([]string{"install", "nametap", chartDir}, "--dry-run=server", "--create-namespace")...)
	}
	c.Helm(install, with([]string{"install", "nametap", chartDir}, "--create-namespace", "--set", "injection.webhook=true")...)
	deploymentHas(c, 2, "--grpc-addr=:15010")
	root := string(secret(c, "nametap-discovery-ca")["tls.crt"])
	certificate := serves(t, c, root)
	// Another program may change what the chart has no value for.
	c.Kubectl("annotate", "deployment/nametap-discovery", "--namespace", discoverySystem, "example.com/note=kept")
	c.Helm(upgrade, with([]string{"upgrade", "nametap", chartDir}, "--set", "injection.webhook=true,injection.ignoredNamespaces={other},discovery.replicas=3,discovery.plaintext=false")...)
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
