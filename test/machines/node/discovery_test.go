package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// system is the namespace of nametap-discovery.
const system = "nametap-system"

// documented returns the commands of README.md for a pod with nametap-discovery, to install it and
// to try it.
func documented(t *testing.T) (install, try []string) {
	t.Helper()
	_, text, _ := strings.Cut(string(readFile(t, "../../../README.md")), "### In a pod")
	text, _, _ = strings.Cut(text, "\nThe pod has ") // injection follows
	for line := range strings.Lines(text) {
		command, _, _ := strings.Cut(line, " #")
		command = strings.TrimSpace(command)
		switch {
		case !strings.HasPrefix(line, "    kubectl ") || strings.Contains(command, "istiod.yaml"):
		case strings.Contains(command, " -f deploy/"):
			install = append(install, command)
		default:
			try = append(try, command)
		}
	}
	if len(install) != 2 || len(try) != 2 {
		t.Fatalf("README.md has the commands %q and %q", install, try)
	}
	return install, try
}

// run runs a command of a document in the directory of the project, and returns its output.
func (c *cluster) run(t *testing.T, command string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*wait.Limit)
	defer cancel()
	dir, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	rest, ok := strings.CutPrefix(command, "kubectl ")
	if !ok {
		t.Fatalf("%q is not a command of kubectl", command)
	}
	script := "cd " + dir + " && exec " + strings.Join(c.kubectl, " ") + " " + rest
	output, err := c.command(ctx, "sh", "-c", script).CombinedOutput()
	return string(output), err
}

// mustRun is like run and fails the test if the command fails.
func (c *cluster) mustRun(t *testing.T, command string) string {
	t.Helper()
	output, err := c.run(t, command)
	t.Logf("$ %s\n%s", command, output)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return output
}

// install runs the commands of README.md that install nametap-discovery, and waits until its replicas
// are ready.
func (c *cluster) install(t *testing.T) {
	t.Helper()
	install, _ := documented(t)
	for _, command := range install {
		c.mustRun(t, command)
	}
	begun := time.Now()
	defer func() {
		if t.Failed() {
			(&space{c, t, system}).keepLogs()
		}
	}()
	c.available(t)
	t.Logf("both replicas are ready after %v", time.Since(begun).Round(time.Millisecond))
}

// available waits until all replicas of nametap-discovery are of the current version and available.
func (c *cluster) available(t *testing.T) {
	t.Helper()
	var now appsv1.Deployment
	wait.Until(t, "nametap-discovery is available", func() bool {
		err := c.api.get("/apis/apps/v1/namespaces/"+system+"/deployments/nametap-discovery", &now)
		return err == nil && now.Status.ObservedGeneration >= now.Generation && now.Status.UpdatedReplicas == *now.Spec.Replicas &&
			now.Status.Replicas == now.Status.UpdatedReplicas && now.Status.AvailableReplicas == now.Status.UpdatedReplicas
	})
}

// testNewcomer runs the commands of README.md that try the pod of the manifest.
func (c *cluster) testNewcomer(t *testing.T) {
	begun := time.Now()
	c.shop(t)
	t.Logf("the pod is ready %v after the replicas", time.Since(begun).Round(time.Millisecond))
	_, try := documented(t)
	c.mustRun(t, try[0])
	var web corev1.Service
	if err := c.api.get("/api/v1/namespaces/default/services/web", &web); err != nil {
		t.Fatal(err)
	}
	created := time.Now()
	var answer string
	wait.Until(t, "the Service is answered", func() bool {
		var err error
		answer, err = c.run(t, try[1])
		return err == nil && strings.Contains(answer, web.Spec.ClusterIP)
	})
	t.Logf("the Service is answered %v after it was created\n$ %s\n%s", time.Since(created).Round(time.Millisecond), try[1], answer)
	for _, replica := range c.replicas(t) {
		p := &pod{space: &space{c, t, system}, name: replica.Name}
		log, err := p.log("nametap-discovery", false)
		t.Logf("the log of %s:\n%s", summary(&replica), log)
		if err != nil || strings.Contains(log, "level=ERROR") {
			t.Errorf("%s: %v, or an error in the log", replica.Name, err)
		}
	}
}

// replicas returns the pods of nametap-discovery.
func (c *cluster) replicas(t *testing.T) []corev1.Pod {
	t.Helper()
	var pods corev1.PodList
	if err := c.api.get("/api/v1/namespaces/"+system+"/pods?labelSelector=app=nametap-discovery", &pods); err != nil {
		t.Fatal(err)
	}
	return pods.Items
}

// names returns the names of the pods of nametap-discovery.
func (c *cluster) names(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, p := range c.replicas(t) {
		names = append(names, p.Name)
	}
	return names
}

// testRollout replaces the replicas twice while a pod asks for mesh names and forwarded names, and
// checks that no query is lost and that changes arrive afterwards.
func (c *cluster) testRollout(t *testing.T) { // D42, D50
	s := c.space(t, nil)
	c.apply(t, serviceEntry)
	p := s.loaded(podOf(t, "discovery"), 500)
	before := c.certificate(t)
	for range 2 {
		begun, old := time.Now(), c.names(t)
		c.mustRun(t, "kubectl rollout restart --namespace="+system+" deployment/nametap-discovery")
		wait.Until(t, "all replicas are replaced", func() bool {
			now := c.names(t)
			return len(now) == 2 && !slices.ContainsFunc(now, func(name string) bool { return slices.Contains(old, name) })
		})
		c.available(t)
		took := time.Since(begun)
		p.connected("nametap-discovery." + system + ".svc:15012")
		t.Logf("the rollout took %v, and the agent was connected after %v", took.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	}
	if c.certificate(t) != before {
		t.Error("the replicas have another certificate")
	}
	c.apply(t, strings.NewReplacer("name: db", "name: late", "db.example.com", "late.example.com", "192.0.2.53", "192.0.2.54").Replace(serviceEntry))
	wait.Until(t, "a change arrives", func() bool {
		answer, err := p.exec("app", "getent", "ahostsv4", "late.example.com")
		return err == nil && strings.Contains(answer, "192.0.2.54")
	})
	p.noneLost()
	p.notRestarted()
	log, err := p.log("nametap", false)
	if err != nil {
		t.Fatal(err)
	}
	// An agent that was sent to a replica that has ended would wait for it for up to 10 s.
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "to the control plane") {
			continue
		}
		t.Logf("the agent: %s", strings.TrimSpace(line))
		if strings.Contains(line, `msg="no stream`) && !strings.Contains(line, "desc = this control plane stops: connect to another one") {
			t.Errorf("an attempt to connect has failed")
		}
	}
}

// certificate returns the certificate that the replicas share.
func (c *cluster) certificate(t *testing.T) string {
	t.Helper()
	var secret corev1.Secret
	if err := c.api.get("/api/v1/namespaces/"+system+"/secrets/nametap-discovery-tls", &secret); err != nil {
		t.Fatal(err)
	}
	return string(secret.Data[corev1.TLSCertKey])
}

// testConfigMap follows docs/discovery.md to serve a ConfigMap in place of the objects of the cluster.
func (c *cluster) testConfigMap(t *testing.T) {
	_, text, _ := strings.Cut(string(readFile(t, "../../../docs/discovery.md")), "### Objects in a ConfigMap")
	text, _, _ = strings.Cut(text, "\n## ")
	var commands, patch []string
	for line := range strings.Lines(text) {
		code, ok := strings.CutPrefix(line, "    ")
		switch {
		case !ok:
		case strings.HasPrefix(code, "kubectl "):
			commands = append(commands, strings.TrimSpace(code))
		default:
			patch = append(patch, code)
		}
	}
	dir := filepath.Join(c.dir, "objects")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(dir, "only.yaml"): strings.NewReplacer("db.example.com", "only.example.com").Replace(serviceEntry),
		c.path("objects.yaml"):          strings.Join(patch, ""),
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, command := range commands {
		c.mustRun(t, strings.NewReplacer("DIRECTORY", dir, "objects.yaml", c.path("objects.yaml")).Replace(command))
	}
	c.available(t)
	shop := c.shop(t)
	wait.Until(t, "the host of the ConfigMap is answered", func() bool {
		answer, err := shop.exec("nametap", "nametap", "query", "only.example.com")
		return err == nil && strings.Contains(answer, "192.0.2.53")
	})
	if answer, err := shop.exec("nametap", "nametap", "table"); err != nil || strings.Contains(answer, "web.default") {
		t.Errorf("the objects of the cluster are served: %v\n%s", err, answer)
	}
}
