package node

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "containerd", "runc", "/usr/lib/cni/bridge", "iptables", "conntrack", "ip", "nsenter", "debootstrap"))
}

// release is the directory of a release to install.
var release = flag.String("node.release", "", "install the images and the chart of the release in this directory instead of the sources")

// TestNode runs all checks on one node, with the images of `make image`. P7.
func TestNode(t *testing.T) { // D42, D50, G6, G9, G10, I0, I4, I6, I11, I21, K11, K15, K16
	if *release != "" {
		testRelease(t)
		return
	}
	c := newCluster(t, buildImages(t))
	install, try := documented(t, c)
	for _, command := range install {
		c.kubectl(t, command)
	}
	c.certify()
	c.available()
	t.Run("newcomer", func(t *testing.T) { c.testNewcomer(t, try) })
	t.Run("rollout", c.testRollout)
	c.startIstiod()
	t.Run("manifest", c.testManifest)
	t.Run("pods", func(t *testing.T) {
		for _, variant := range []string{"discovery", "istiod"} {
			t.Run("first query with "+variant, func(t *testing.T) { c.testFirstQuery(t, variant) })
		}
		t.Run("agent killed", c.testAgentKilled)
		t.Run("agent hangs", c.testAgentHangs)
		t.Run("control plane away", c.testControlPlaneAway)
		t.Run("run as non-root", c.testRunAsNonRoot)
	})
	t.Run("injected delay", c.testInjectedDelay) // alone, for its figures
	c.Apply(manifest(t, "webhook"))
	c.certify("--webhook")
	t.Run("injected", func(t *testing.T) {
		for _, mode := range []string{"rules", "resolv", "webhook"} {
			t.Run(mode, injection{c, mode, discoveryAddr, ""}.test)
		}
		t.Run("jobs", injection{c, "resolv", discoveryAddr, ""}.testJobs)
	})
	t.Run("guard", c.testGuard) // alone, because its loops need a processor
	t.Run("token", c.testToken) // alone, because it restarts kubelet and istiod
}

// testRelease installs the images and the chart of a release, and checks a pod that the webhook injects. P7, P9.
func testRelease(t *testing.T) {
	images, err := filepath.Glob(filepath.Join(*release, "*-image.tar"))
	charts, _ := filepath.Glob(filepath.Join(*release, "nametap-[0-9]*.tgz"))
	if err != nil || len(images) != 3 || len(charts) != 1 {
		t.Fatalf("%s has the images %q and the charts %q, want three and one (%v)", *release, images, charts, err)
	}
	c := newCluster(t, images)
	c.Helm("helm4", "install", "nametap", charts[0], "--namespace", system, "--create-namespace", "--set", "injection.webhook=true")
	c.available()
	c.Apply(serviceEntry)
	t.Run("injected/webhook", injection{c, "webhook", discoveryAddr, ""}.test)
}

// The namespace of nametap-discovery, and its address.
const (
	system        = "nametap-system"
	discoveryAddr = "nametap-discovery." + system + ".svc:15012"
)

// documented returns the commands of README.md for a pod with nametap-discovery, to install it and to try it.
func documented(t *testing.T, c *cluster) (install, try []string) {
	t.Helper()
	_, text, _ := strings.Cut(c.Read(lab.Repository()+"/README.md"), "### In a pod")
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

// certify makes the certificate of nametap-discovery, of the authority that there is.
func (c *cluster) certify(flags ...string) {
	c.TB.Helper()
	flags = append([]string{"certificates", "--pods-in", "default"}, flags...)
	if ca, err := c.TryKubectl("get", "secret", "nametap-discovery-ca", "--namespace", system, "-o", "yaml"); err == nil {
		flags = append(flags, "--authority", c.Write("ca.yaml", ca))
	}
	text, err := exec.Command(lab.Program(c.TB, "nametap-discovery"), flags...).Output()
	if err != nil {
		c.TB.Fatal(err)
	}
	c.Kubectl("apply", "--server-side", "-f", c.Write("certificates.yaml", string(text)))
	c.Write("root-cert.pem", c.root())
}

// root returns the root certificate of nametap-discovery.
func (c *cluster) root() string {
	c.TB.Helper()
	var secret corev1.Secret
	c.Get("/api/v1/namespaces/"+system+"/secrets/nametap-discovery-cert", &secret)
	return string(secret.Data["ca.crt"])
}

// kubectl runs a command of a document in the directory of the project.
func (c *cluster) kubectl(t *testing.T, command string) {
	t.Helper()
	c.in(t).Kubectl(strings.Fields(strings.ReplaceAll(strings.TrimPrefix(command, "kubectl "), "-f deploy/", "-f "+lab.Repository()+"/deploy/"))...)
}

// available waits until all replicas of nametap-discovery are of the current version and available.
func (c *cluster) available() {
	c.TB.Helper()
	defer func() {
		if t, ok := c.TB.(*testing.T); ok && t.Failed() {
			(&space{c, t, system}).keepLogs()
		}
	}()
	var now appsv1.Deployment
	lab.Until(c.TB, "nametap-discovery is available", func() bool {
		err := c.Do(http.MethodGet, "/apis/apps/v1/namespaces/"+system+"/deployments/nametap-discovery", nil, &now)
		return err == nil && now.Status.ObservedGeneration >= now.Generation && now.Status.UpdatedReplicas == *now.Spec.Replicas &&
			now.Status.Replicas == now.Status.UpdatedReplicas && now.Status.AvailableReplicas == now.Status.UpdatedReplicas
	})
}

// shop is the pod of the manifest in the namespace default.
func (c *cluster) shop(t *testing.T) *pod {
	t.Helper()
	p := &pod{space: &space{c.in(t), t, "default"}, name: "shop"}
	p.ready()
	return p
}

// testNewcomer runs the commands of README.md that try the pod of the manifest.
func (c *cluster) testNewcomer(t *testing.T, try []string) {
	c.shop(t)
	c.kubectl(t, try[0])
	var web corev1.Service
	c.Get("/api/v1/namespaces/default/services/web", &web)
	wait.Until(t, "the Service is answered", func() bool {
		answer, err := c.TryKubectl(strings.Fields(strings.TrimPrefix(try[1], "kubectl "))...)
		return err == nil && strings.Contains(answer, web.Spec.ClusterIP)
	})
	for _, name := range c.replicas() {
		log, err := (&pod{space: &space{c, t, system}, name: name}).log("nametap-discovery", false)
		starting := strings.Count(log, "storage is (re)initializing") // the API server has just got the resource
		if err != nil || strings.Count(log, "level=ERROR") > starting {
			t.Errorf("%s: %v, or an error in the log\n%s", name, err, log)
		}
	}
}

// replicas returns the names of the pods of nametap-discovery.
func (c *cluster) replicas() (names []string) {
	var pods corev1.PodList
	c.Get("/api/v1/namespaces/"+system+"/pods?labelSelector=app=nametap-discovery", &pods)
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	return names
}

// testRollout replaces the replicas twice while a pod asks for mesh names and forwarded names, and
// checks that no query is lost, that the certificate stays, and that changes arrive afterwards.
func (c *cluster) testRollout(t *testing.T) {
	s := c.space(t, "")
	s.Apply(serviceEntry)
	p := s.loaded(podOf(t, "discovery"), 500)
	certificate := func() string {
		var secret corev1.Secret
		s.Get("/api/v1/namespaces/"+system+"/secrets/nametap-discovery-cert", &secret)
		return string(secret.Data[corev1.TLSCertKey])
	}
	before := certificate()
	for range 2 {
		old := c.replicas()
		c.kubectl(t, "kubectl rollout restart --namespace="+system+" deployment/nametap-discovery")
		lab.Until(t, "all replicas are replaced", func() bool {
			now := c.replicas()
			return len(now) == 2 && !slices.ContainsFunc(now, func(name string) bool { return slices.Contains(old, name) })
		})
		c.in(t).available()
		p.connected(strings.Split(discoveryAddr, ":")[0])
	}
	if certificate() != before {
		t.Error("the replicas have another certificate")
	}
	s.Apply(strings.NewReplacer("name: db", "name: late", "db.example.com", "late.example.com", "192.0.2.53", "192.0.2.54").Replace(serviceEntry))
	p.has("late.example.com", "192.0.2.54")
	p.noneLost()
	p.notRestarted()
	log, err := p.log("nametap", false)
	if err != nil {
		t.Fatal(err)
	}
	// An agent that was sent to a replica that has ended would wait for it for up to 10 s.
	for line := range strings.Lines(log) {
		if strings.Contains(line, `msg="no stream to the control plane`) && !strings.Contains(line, "desc = this control plane stops: connect to another one") {
			t.Errorf("an attempt to connect has failed: %s", line)
		}
	}
}

// testManifest checks the pod that the manifest of nametap-discovery makes.
func (c *cluster) testManifest(t *testing.T) {
	shop := c.shop(t)
	shop.has("db.example.com", "192.0.2.53")
	status := shop.mustExec("nametap", "status")
	if !strings.Contains(status, "connected to "+discoveryAddr) {
		t.Errorf("nametap status: %s", status)
	}
	// The agent's container cannot read the rules, and says what is captured.
	for _, text := range []string{status, shop.mustExec("nametap", "capture", "status")} {
		if !strings.Contains(text, "IPv4 redirected: an agent answers a test query") {
			t.Errorf("the status does not say that IPv4 is captured: %s", text)
		}
	}
}

// testFirstQuery checks that init containers run in their order, and that the first query of
// an init container after nametap's, and of the app, is answered.
func (c *cluster) testFirstQuery(t *testing.T, variant string) {
	t.Parallel()
	s := c.space(t, "")
	spec := podOf(t, variant)
	before := s.asker(spec, "before", 200, "-for=500ms", "-expect=/questions/forwarded.json")
	after := s.asker(spec, "after", 500, "-for=1s")
	spec.Spec.InitContainers = slices.Concat([]corev1.Container{before}, spec.Spec.InitContainers, []corev1.Container{after})
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", 500, "-for=5s"))
	p := s.create(spec)
	p.wantRight("before", "after", "load")
	now := p.now()
	times := []time.Time{
		status(now, "before").State.Terminated.FinishedAt.Time, status(now, "nametap").State.Running.StartedAt.Time,
		status(now, "nametap-capture").State.Terminated.FinishedAt.Time, status(now, "after").State.Terminated.StartedAt.Time,
		status(now, "after").State.Terminated.FinishedAt.Time, status(now, "app").State.Running.StartedAt.Time,
	}
	if !slices.IsSortedFunc(times, time.Time.Compare) {
		t.Errorf("the containers did not run in their order: %v", times)
	}
	p.has("db.example.com", "192.0.2.53")
	p.connected("")
}

// testAgentKilled kills the agent again and again, and checks that DNS is never away. Queries wait in the sockets, so
// queries for mesh names over UDP are late, but not lost. Queries that the agent has forwarded, and its TCP connections,
// end with it.
func (c *cluster) testAgentKilled(t *testing.T) {
	t.Parallel()
	s := c.space(t, "")
	p := s.loaded(podOf(t, "discovery"), 200, "-expect=/questions/mesh.json", "-tcp=0")
	supervisor := p.pid("nametap")
	for i := range 5 {
		agent := p.agent()
		p.kill(agent, syscall.SIGKILL)
		p.replaced(supervisor, agent)
		if i > 1 { // the others are killed while they start
			p.connected("")
		}
	}
	p.has("db.example.com", "192.0.2.53")
	if report := p.stop("load"); report.Bad() > 0 || report.LongestGap-report.Lag > 5*time.Second {
		t.Errorf("%d of %d queries have no right answer; DNS was away for %v", report.Bad(), report.Queries, report.LongestGap)
	}
	p.notRestarted()
}

// testAgentHangs stops the agent's process, and checks that kubelet restarts its container within a minute.
func (c *cluster) testAgentHangs(t *testing.T) {
	t.Parallel()
	s := c.space(t, "")
	p := s.loaded(podOf(t, "discovery"), 100)
	begun := time.Now()
	p.kill(p.agent(), syscall.SIGSTOP)
	wait.Until(t, "kubelet has restarted the container", func() bool { return status(p.now(), "nametap").RestartCount > 0 })
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("the container was restarted after %v, want at most a minute", took)
	}
	p.has("db.example.com", "192.0.2.53")
}

// away gives a pod a control plane at an address where no machine is.
func away(spec *corev1.Pod) {
	for key, text := range spec.Annotations {
		spec.Annotations[key] = strings.Replace(text, discoveryAddr, "172.30.0.99:15012", 1)
	}
}

// testControlPlaneAway checks that a pod starts without its control plane, and that forwarded
// names are answered from the app's first instant.
func (c *cluster) testControlPlaneAway(t *testing.T) {
	t.Parallel()
	s := c.space(t, "")
	spec := podOf(t, "discovery")
	away(spec)
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", 200, "-for=15s", "-expect=/questions/forwarded.json"))
	p := s.create(spec)
	p.ready()
	p.wantRight("load")
	if status := p.mustExec("nametap", "status"); !strings.Contains(status, "not connected to 172.30.0.99:15012") {
		t.Errorf("nametap status: %s", status)
	}
}

// testRunAsNonRoot checks that a pod starts whose own security context forbids root.
func (c *cluster) testRunAsNonRoot(t *testing.T) {
	t.Parallel()
	s := c.space(t, "")
	spec := podOf(t, "discovery")
	yes, user := true, int64(1000)
	spec.Spec.SecurityContext.RunAsNonRoot, spec.Spec.SecurityContext.RunAsUser = &yes, &user
	p := s.create(spec)
	p.ready()
	p.has("db.example.com", "192.0.2.53")
}

// testToken lets kubelet renew the projected token, and checks that the agent connects with
// the new one. A kubelet that was restarted renews all tokens.
func (c *cluster) testToken(t *testing.T) {
	s := c.space(t, "")
	p := s.loaded(podOf(t, "istiod"), 200)
	path := fmt.Sprintf("/proc/%d/root/var/run/secrets/tokens/istio-token", p.pid("nametap"))
	first := p.Read(path)
	c.kubelet.End(syscall.SIGKILL)
	c.startKubelet()
	lab.Until(t, "kubelet has renewed the token", func() bool { return p.Read(path) != first })
	for range 2 {
		c.istiod.Process.End(syscall.SIGKILL)
		c.istiod.Launch()
		c.istiod.AwaitReady()
		p.connected("istiod")
	}
	p.noneLost()
}
