package interop

import (
	"context"
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
	"github.com/nametap/nametap/test/machines/peers"
)

// helm runs a command of Helm, which is "helm3" or "helm4", and returns its output.
func (c *cluster) helm(version string, args ...string) string {
	c.tb.Helper()
	output, err := c.tryHelm(version, args...)
	if err != nil {
		c.tb.Fatalf("%s %s: %v\n%s", version, strings.Join(args, " "), err, output)
	}
	return output
}

// tryHelm is like helm and returns an error, with its text in the output.
func (c *cluster) tryHelm(version string, args ...string) (string, error) {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(c.tb.Context(), 2*wait.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, peers.Build(c.tb, version), args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.path("kubeconfig"))
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := c.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return stdout.String() + stderr.String(), err
	}
	return stdout.String(), nil
}

// TestChart installs, upgrades and uninstalls the chart with Helm 3 and 4, while nametap-discovery runs
// and checks that its caBundle stays and that nothing is left after the commands of docs/chart.md.
func TestChart(t *testing.T) { // I8, P9
	c := prepareCluster(t)
	c.boot()
	c.mustKubectl("create", "namespace", "other")
	// Helm leaves custom resource definitions, and `kubectl delete` removes them with their objects.
	c.mustKubectl("create", "-f", manifests+"crds.yaml")
	for _, by := range []chartVersions{
		{"helm3", chartDir, "helm3", nil}, {"helm3", chartDir, "helm4", nil}, {"helm4", chartDir, "helm4", nil},
		// It has no Secret, so nametap-discovery makes it.
		{"helm4", firstChart(t), "helm4", []string{"--take-ownership", "--force-conflicts"}},
	} {
		t.Run(by.install+" then "+by.upgrade, func(t *testing.T) { c.testChart(t, by) })
	}
}

// The chart, and the flags of a release.
const chartDir = "../../../deploy/chart"

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

func (c *cluster) testChart(t *testing.T, by chartVersions) {
	t.Helper()
	install, upgrade := by.install, by.upgrade
	whole := c.tb
	c.tb = t
	defer func() { c.tb = whole }()
	before := c.everything()
	with := func(command []string, more ...string) []string { return slices.Concat(command, releaseFlags, more) }
	if install == "helm3" {
		c.helm(install, with([]string{"install", "nametap", by.chart}, "--dry-run=server", "--create-namespace")...)
	}
	c.helm(install, with([]string{"install", "nametap", by.chart}, "--create-namespace", "--set", "injection.webhook=true")...)
	c.deploymentHas(2, "--grpc-addr=:15010")
	// What nametap-discovery itself makes.
	process := c.discovery("--inject-addr=127.0.0.1:16017", "--tls-addr=127.0.0.1:16012", "--tls-secret="+discoverySystem+"/nametap-discovery-tls", "--lease="+discoverySystem+"/nametap-discovery")
	wait.Until(t, "the root certificate is in the namespaces", func() bool {
		return strings.Count(c.mustKubectl("get", "configmaps", "--all-namespaces", "-o", "name", "--field-selector", "metadata.name="+rootConfigMap), "\n") >= 3
	})
	var bundles []string
	wait.Until(t, "nametap-discovery has written the caBundle", func() bool {
		bundles = c.bundles()
		return len(bundles) == 2 && bundles[0] != "" && bundles[1] != ""
	})
	process.process.end(os.Interrupt) // so that it does not write the caBundle again
	certificate := string(c.secret().Data["tls.crt"])
	// Another program may change what the chart has no value for.
	c.mustKubectl("annotate", "deployment/nametap-discovery", "--namespace", discoverySystem, "example.com/note=kept")
	c.helm(upgrade, with(append([]string{"upgrade", "nametap", chartDir}, by.flags...), "--set", "injection.webhook=true,injection.ignoredNamespaces={other},discovery.replicas=3,discovery.plaintext=false")...)
	if diff := cmp.Diff(bundles, c.bundles()); diff != "" {
		t.Errorf("the caBundle before (-) and after the upgrade (+):\n%s", diff)
	}
	if got := string(c.secret().Data["tls.crt"]); got != certificate || got == "" {
		t.Error("the upgrade has replaced the certificate")
	}
	c.deploymentHas(3, "--state-dir=")
	var d appsv1.Deployment
	c.get(deploymentPath, &d)
	if d.Annotations["example.com/note"] != "kept" || slices.Contains(d.Spec.Template.Spec.Containers[0].Args, "--grpc-addr=:15010") {
		t.Errorf("after the upgrade: %v, %v", d.Annotations, d.Spec.Template.Spec.Containers[0].Args)
	}
	// A key that is unknown changes nothing.
	if output, err := c.tryHelm(upgrade, with([]string{"upgrade", "nametap", chartDir}, "--set", "discovery.replica=5")...); err == nil || !strings.Contains(output, "replica") {
		t.Errorf("an unknown key: %v, %s", err, output)
	}
	c.deploymentHas(3, "--state-dir=")
	c.helm(upgrade, with([]string{"uninstall", "nametap"}, "--wait")...)
	for _, command := range uninstallCommands(t) {
		c.mustKubectl(strings.Fields(strings.TrimPrefix(command, "kubectl "))...)
	}
	var after map[string]bool
	wait.Until(t, "all objects are removed", func() bool {
		after = c.everything()
		return maps.Equal(before, after)
	})
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("objects before (-) and after (+):\n%s", diff)
	}
}

const deploymentPath = "/apis/apps/v1/namespaces/" + discoverySystem + "/deployments/nametap-discovery"

// deploymentHas checks the replicas and an argument of nametap-discovery.
func (c *cluster) deploymentHas(replicas int32, arg string) {
	c.tb.Helper()
	var d appsv1.Deployment
	c.get(deploymentPath, &d)
	if args := d.Spec.Template.Spec.Containers[0].Args; *d.Spec.Replicas != replicas || !slices.Contains(args, arg) {
		c.tb.Errorf("%d replicas with %q, want %d with %s", *d.Spec.Replicas, args, replicas, arg)
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
func (c *cluster) everything() map[string]bool {
	c.tb.Helper()
	kinds := slices.DeleteFunc(strings.Fields(c.mustKubectl("api-resources", "--verbs=list", "-o", "name")), func(kind string) bool {
		return strings.HasPrefix(kind, "events") || strings.HasPrefix(kind, "componentstatuses")
	})
	all := map[string]bool{}
	output := c.mustKubectl("get", strings.Join(kinds, ","), "--all-namespaces", "--ignore-not-found", "--no-headers",
		"-o", `custom-columns=K:.kind,NS:.metadata.namespace,N:.metadata.name`)
	for line := range strings.Lines(output) {
		if fields := strings.Fields(line); len(fields) == 3 {
			all[strings.Join(fields, " ")] = true
		}
	}
	if len(all) < 50 {
		c.tb.Fatalf("kubectl lists only %d objects:\n%s", len(all), output)
	}
	return all
}
