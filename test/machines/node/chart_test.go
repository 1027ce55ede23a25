package node

import (
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/peers"
)

// chartCommands returns the commands of a part of docs/chart.md, from its beginning or a heading on.
func chartCommands(t *testing.T, from, to string) []string {
	t.Helper()
	_, text, ok := strings.Cut(string(readFile(t, "../../../docs/chart.md")), from)
	text, _, ok2 := strings.Cut(text, to)
	if !ok || !ok2 {
		t.Fatalf("docs/chart.md has no %q before %q", from, to)
	}
	var commands []string
	for line := range strings.Lines(text) {
		command, _, _ := strings.Cut(line, " #")
		if strings.HasPrefix(line, "    helm ") || strings.HasPrefix(line, "    kubectl ") {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	return commands
}

// TestChart goes the way of docs/chart.md on a node of its own, each command as written: it installs the chart,
// switches the webhook on, and a pod that is created gets the agent, which answers. Then it uninstalls. P9.
func TestChart(t *testing.T) {
	c := newCluster(t)
	installing := chartCommands(t, "# The Helm chart\n", "If pods use the istiod")
	if len(installing) != 4 {
		t.Fatalf("docs/chart.md has the commands %q", installing)
	}
	c.apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n"+
		"apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {ports: [{port: 80}]}\n")
	c.helm(t, installing[0])
	c.mustRun(t, installing[1])
	c.available(t)
	c.helm(t, installing[2])
	c.available(t)
	c.caBundles(t)
	c.mustRun(t, installing[3])
	c.apply(t, "apiVersion: v1\nkind: Pod\nmetadata: {name: cart, namespace: shop}\n"+
		"spec: {terminationGracePeriodSeconds: 0, containers: [{name: app, image: 'debian:12-slim', command: [sleep, infinity]}]}\n")
	p := &pod{space: &space{c, t, "shop"}, name: "cart"}
	defer func() {
		if t.Failed() {
			p.keepLogs()
			(&space{c, t, system}).keepLogs()
		}
	}()
	p.ready()
	var web corev1.Service
	if err := c.api.get("/api/v1/namespaces/shop/services/web", &web); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the Service is answered", func() bool {
		answer, err := p.exec("nametap", "nametap", "query", "web")
		return err == nil && strings.Contains(answer, web.Spec.ClusterIP)
	})
	c.mustRun(t, "kubectl delete pod cart --namespace shop")
	for _, command := range chartCommands(t, "\n## Uninstall\n", "Pods that have the agent keep it") {
		if strings.HasPrefix(command, "helm ") {
			c.helm(t, command)
		} else {
			c.mustRun(t, command)
		}
	}
}

// helm runs a command of a document with Helm 4, in the directory of the project.
func (c *cluster) helm(t *testing.T, command string) {
	t.Helper()
	dir, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	rest := strings.TrimPrefix(command, "helm ")
	script := "cd " + dir + " && exec env HOME=/run KUBECONFIG=" + c.path("kubeconfig") + " " + peers.Build(t, "helm4") + " " + rest
	output, err := c.command(t.Context(), "sh", "-c", script).CombinedOutput()
	t.Logf("$ %s\n%s", command, output)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
}
