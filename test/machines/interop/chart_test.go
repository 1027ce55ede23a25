package interop

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// TestChart installs, upgrades and uninstalls the chart with Helm 3 and 4, while nametap-discovery runs
// and checks that its caBundle stays and that nothing is left after the commands of docs/chart.md.
func TestChart(t *testing.T) { // I8, P9
	c := lab.NewCluster(t)
	c.Boot()
	c.Kubectl("create", "namespace", "other")
	// Helm leaves custom resource definitions, and `kubectl delete` removes them with their objects.
	c.Kubectl("create", "-f", manifest("crds.yaml"))
	for _, by := range []chartVersions{
		{"helm3", chartDir, "helm4", nil},
		// It has no Secret, so nametap-discovery makes it.
		{"helm4", firstChart(t), "helm4", []string{"--take-ownership", "--force-conflicts"}},
	} {
		t.Run(by.install+" then "+by.upgrade, func(t *testing.T) { testChart(t, c.In(t), by) })
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

// firstChart returns the directory of the first chart in the history of the sources.
func firstChart(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	command := exec.CommandContext(t.Context(), "sh", "-euc", `cd ../../..
commit=$(git log --format=%h --diff-filter=A -- deploy/chart/Chart.yaml)
git archive "$commit" deploy/chart | tar --extract --directory="$1"`, "sh", dir)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	return filepath.Join(dir, "deploy/chart")
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
	// What nametap-discovery itself makes.
	process := discovery(c, "--inject-addr=127.0.0.1:16017", "--tls-addr=127.0.0.1:16012", "--tls-secret="+discoverySystem+"/nametap-discovery-tls")
	wait.Until(t, "the root certificate is in the namespaces", func() bool {
		return strings.Count(c.Kubectl("get", "configmaps", "--all-namespaces", "-o", "name", "--field-selector", "metadata.name="+rootConfigMap), "\n") >= 3
	})
	var made []string
	wait.Until(t, "nametap-discovery has written the caBundle", func() bool {
		made = bundles(c)
		return len(made) == 2 && made[0] != "" && made[1] != ""
	})
	process.End(os.Interrupt) // so that it does not write the caBundle again
	certificate := string(secret(c)["tls.crt"])
	// Another program may change what the chart has no value for.
	c.Kubectl("annotate", "deployment/nametap-discovery", "--namespace", discoverySystem, "example.com/note=kept")
	c.Helm(upgrade, with(append([]string{"upgrade", "nametap", chartDir}, by.flags...), "--set", "injection.webhook=true,injection.ignoredNamespaces={other},discovery.replicas=3,discovery.plaintext=false")...)
	if diff := cmp.Diff(made, bundles(c)); diff != "" {
		t.Errorf("the caBundle before (-) and after the upgrade (+):\n%s", diff)
	}
	if got := string(secret(c)["tls.crt"]); got != certificate || got == "" {
		t.Error("the upgrade has replaced the certificate")
	}
	deploymentHas(c, 3, "--state-dir=")
	var d appsv1.Deployment
	c.Get(deploymentPath, &d)
	if d.Annotations["example.com/note"] != "kept" || slices.Contains(d.Spec.Template.Spec.Containers[0].Args, "--grpc-addr=:15010") {
		t.Errorf("after the upgrade: %v, %v", d.Annotations, d.Spec.Template.Spec.Containers[0].Args)
	}
	// A key that is unknown changes nothing.
	if output, err := c.TryHelm(upgrade, with([]string{"upgrade", "nametap", chartDir}, "--set", "discovery.replica=5")...); err == nil || !strings.Contains(output, "replica") {
		t.Errorf("an unknown key: %v, %s", err, output)
	}
	deploymentHas(c, 3, "--state-dir=")
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
	if len(commands) != 2 {
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
