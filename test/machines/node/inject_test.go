package node

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// An injection is a mode of `nametap inject`, or the webhook, with a control plane.
type injection struct {
	*cluster
	mode    string   // "rules", "resolv" or "webhook"
	control string   // host:port
	flags   []string // of nametap inject
}

// buildPrograms builds the commands of the project, and returns their directory.
func buildPrograms(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-tags=grpcnotrace,nethttpomithttp2", "-o", dir+"/", "./cmd/nametap", "./cmd/nametap-discovery")
	build.Dir = "../../.." // the module of the commands
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, output)
	}
	return dir
}

// discoveryAddr is the address of nametap-discovery.
const discoveryAddr = "nametap-discovery." + system + ".svc:15012"

// inject runs `nametap inject` for an object, and reads the result into out, which must have all its
// fields.
func (in injection) inject(t *testing.T, namespace string, object, out any) {
	t.Helper()
	text, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{
		"inject", "--namespace", namespace, "--mode", in.mode, "--nameserver", clusterIP,
		"--control-plane", in.control, "--root-cert", "nametap-ca-root-cert",
	}, in.flags...)
	cmd := exec.CommandContext(t.Context(), in.programs+"/nametap", args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &stdout, &stderr
	if err := cmd.Run(); err != nil || !strings.Contains(stderr.String(), ": injected: ") {
		t.Fatalf("%v: %v\n%s", cmd, err, &stderr)
	}
	if err := yaml.UnmarshalStrict(stdout.Bytes(), out); err != nil {
		t.Fatal(err)
	}
}

// app is a pod without nametap that the Pod Security level restricted allows, with an app that waits.
func app() *corev1.Pod {
	yes, no, user := true, false, int64(1000)
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "shop"},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: &no,
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &user, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{confine(corev1.Container{Name: "app", Image: "debian:12-slim", Command: []string{"sleep", "infinity"}})},
		},
	}
}

// confine returns a container without rights.
func confine(c corev1.Container) corev1.Container {
	no := false
	c.SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
	return c
}

// pod creates an injected pod.
func (in injection) pod(s *space, spec *corev1.Pod) *pod {
	s.t.Helper()
	if in.mode == "webhook" {
		return s.create(spec)
	}
	injected := new(corev1.Pod)
	in.inject(s.t, s.name, spec, injected)
	return s.create(injected)
}

// askers returns a pod with an init container and a container that ask from their first instant.
func (in injection) askers(s *space, args ...string) *corev1.Pod {
	spec := app()
	spec.Spec.InitContainers = []corev1.Container{confine(s.asker(spec, "after", 500, "-for=1s"))}
	spec.Spec.Containers = append(spec.Spec.Containers, confine(s.asker(spec, "load", 500, args...)))
	return spec
}

// test checks that the first query of an init container, and of the app, is answered (I4), and what
// `nametap status` says.
func (in injection) test(t *testing.T) {
	t.Parallel()
	s := in.space(t, in.level())
	p := in.pod(s, in.askers(s, "-for=5s"))
	for _, name := range []string{"after", "load"} {
		report := p.report(name)
		t.Logf("%s: %v", name, report)
		if report.Bad() > 0 || report.Queries < 50 {
			t.Errorf("%s: %d of %d queries have no right answer", name, report.Bad(), report.Queries)
		}
	}
	if answer := p.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("getent: %s", answer)
	}
	resolvConf := p.mustExec("app", "cat", "/etc/resolv.conf")
	want := map[string]string{
		"rules":   "capture        IPv4 redirected: an agent answers a test query",
		"webhook": "capture        IPv4 redirected: an agent answers a test query",
		"resolv":  "capture        no rules are needed: the agent is the only nameserver of /etc/resolv.conf",
	}[in.mode]
	text := p.mustExec("nametap", "nametap", "status")
	t.Logf("nametap status:\n%s\n/etc/resolv.conf:\n%s", text, resolvConf)
	if !strings.Contains(text, want) || !strings.Contains(text, "connected to "+in.control) || strings.Contains(text, "not connected") || strings.Contains(text, "IPv4 not redirected") {
		t.Errorf("nametap status: want %q:\n%s", want, text)
	}
	p.notRestarted()
}

// level returns the labels of a namespace that enforces the strictest Pod Security level that the mode
// allows (I11).
func (in injection) level() map[string]string {
	switch in.mode {
	case "resolv":
		return map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}
	case "webhook":
		return map[string]string{"nametap.dev/inject": "enabled"}
	}
	return nil
}

// startWebhook has the API server ask nametap-discovery about pods that are created.
func (c *cluster) startWebhook(t *testing.T) {
	t.Helper()
	c.apply(t, manifest(t, "webhook"))
	c.caBundles(t)
}

// caBundles waits until nametap-discovery has written the caBundle of the webhook.
func (c *cluster) caBundles(t *testing.T) {
	t.Helper()
	var hook struct {
		Webhooks []struct{ ClientConfig struct{ CABundle string } }
	}
	wait.Until(t, "nametap-discovery has written the caBundle", func() bool {
		err := c.api.get("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/nametap-inject", &hook)
		return err == nil && len(hook.Webhooks) == 2 && hook.Webhooks[0].ClientConfig.CABundle != "" && hook.Webhooks[1].ClientConfig.CABundle != ""
	})
}

// testJob checks that an injected Job completes (I6).
func (in injection) testJob(t *testing.T) {
	t.Parallel()
	s := in.space(t, in.level())
	job := batchv1.Job{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"}, ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: s.injectableJob()}
	var injected batchv1.Job
	in.inject(t, s.name, job, &injected)
	jobs := "/apis/batch/v1/namespaces/" + s.name + "/jobs"
	begun := time.Now()
	if err := in.api.create(jobs, injected); err != nil {
		t.Fatal(err)
	}
	s.finished(injected)
	wait.Until(t, "the Job is complete", func() bool {
		var now batchv1.Job
		return in.api.get(jobs+"/job", &now) == nil && now.Status.CompletionTime != nil
	})
	t.Logf("the Job is complete after %v", time.Since(begun).Round(time.Millisecond))
}

// testCronJob checks that the Jobs of an injected CronJob complete (I6).
func (in injection) testCronJob(t *testing.T) {
	t.Parallel()
	s := in.space(t, in.level())
	cron := batchv1.CronJob{
		TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "CronJob"}, ObjectMeta: metav1.ObjectMeta{Name: "cron"},
		Spec: batchv1.CronJobSpec{Schedule: "* * * * *", JobTemplate: batchv1.JobTemplateSpec{Spec: s.injectableJob()}},
	}
	var injected batchv1.CronJob
	in.inject(t, s.name, cron, &injected)
	s.finished(s.firstJob(injected))
}

// injectableJob returns a Job without nametap, whose app asks for two seconds.
func (s *space) injectableJob() batchv1.JobSpec {
	spec := app()
	spec.Spec.Containers = []corev1.Container{confine(s.asker(spec, "app", 500, "-for=2s"))}
	spec.Spec.RestartPolicy = corev1.RestartPolicyNever
	return batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: spec.Spec}}
}

// testHang stops the agent's process in an injected pod, and checks that it is replaced within 30 s
// (I0).
func (in injection) testHang(t *testing.T) {
	t.Parallel()
	s := in.space(t, in.level())
	p := in.pod(s, in.askers(s, "-timeout=30s"))
	p.ready()
	supervisor, agent := p.pid("nametap"), p.agent()
	begun := time.Now()
	p.kill(agent, syscall.SIGSTOP)
	p.replaced(supervisor, agent)
	took := time.Since(begun)
	t.Logf("the agent was replaced after %v", took.Round(time.Millisecond))
	if took > 30*time.Second {
		t.Errorf("the agent was replaced after %v, want at most 30s", took)
	}
	report := p.stop("load")
	t.Logf("with a timeout of 30 s: %v", report)
	if report.Bad() > report.Queries/20 { // the agent had some of them, before it hung
		t.Errorf("%d of %d queries have no right answer, though they could wait", report.Bad(), report.Queries)
	}
	p.notRestarted()
}

// testInjectedDelay measures how much later injected pods are Ready (I0).
func (c *cluster) testInjectedDelay(t *testing.T) {
	s := c.space(t, nil)
	injected := func(mode, control string, change func(*corev1.Pod)) func(*corev1.Pod) {
		return func(spec *corev1.Pod) {
			injection{c, mode, control, nil}.inject(t, s.name, spec.DeepCopy(), spec)
			change(spec)
		}
	}
	as := func(*corev1.Pod) {}
	const nowhere = "172.30.0.99:15012"
	compareDelays(t, s, app, []delay{
		{name: "without nametap", change: as},
		{name: "with an idle sidecar in place of the agent", change: injected("resolv", discoveryAddr, idleAgent), atMost: 2 * time.Second},
		{name: "mode rules", change: injected("rules", discoveryAddr, as), atMost: 3 * time.Second},
		{name: "mode resolv", change: injected("resolv", discoveryAddr, as), atMost: 2 * time.Second},
		{name: "mode resolv with a startup probe in place of the hook", change: injected("resolv", discoveryAddr, startupProbe), atMost: 4 * time.Second},
		{name: "mode rules, without a control plane", change: injected("rules", nowhere, as), atMost: 8 * time.Second},
		{name: "mode resolv, without a control plane", change: injected("resolv", nowhere, as), atMost: 8 * time.Second},
	})
}

// idleAgent makes the agent's container one that sleeps, in a pod of mode resolv.
func idleAgent(spec *corev1.Pod) {
	c := &spec.Spec.InitContainers[0]
	c.Image, c.Command, c.Args = spec.Spec.Containers[0].Image, []string{"sleep", "infinity"}, nil
	c.Lifecycle, c.ReadinessProbe, c.LivenessProbe = nil, nil, nil
}

// startupProbe makes kubelet wait by a probe.
func startupProbe(spec *corev1.Pod) {
	c := &spec.Spec.InitContainers[0]
	c.Lifecycle = nil
	c.StartupProbe = &corev1.Probe{ProbeHandler: c.ReadinessProbe.ProbeHandler, PeriodSeconds: 1, FailureThreshold: 30}
}

// A delay is a variant of a pod, and how long its pods took until they were Ready.
type delay struct {
	name   string
	change func(*corev1.Pod)
	atMost time.Duration // that the fastest is later than the fastest of the first variant
	delays []time.Duration
}

// compareDelays measures variants of a pod in turn, and compares them with the first one.
func compareDelays(t *testing.T, s *space, pod func() *corev1.Pod, variants []delay) {
	t.Helper()
	for i := range 10 {
		for v := range variants {
			spec := pod()
			spec.Name = fmt.Sprintf("shop-%d-%d", v, i)
			variants[v].change(spec)
			p := s.create(spec)
			variants[v].delays = append(variants[v].delays, p.ready())
			if err := s.api.do(http.MethodDelete, s.path("pods", p.name)+"?gracePeriodSeconds=0", nil, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	median := func(v int) time.Duration {
		slices.Sort(variants[v].delays)
		return variants[v].delays[len(variants[v].delays)/2].Round(time.Millisecond)
	}
	for v, variant := range variants {
		later := median(v) - median(0)
		least := variant.delays[0] - variants[0].delays[0] // what does not depend on other programs
		t.Logf("%s: Ready after %v (median of %d, from %v to %v), %v later; the fastest %v later", variant.name, median(v), len(variant.delays),
			variant.delays[0].Round(time.Millisecond), variant.delays[len(variant.delays)-1].Round(time.Millisecond), later, least.Round(time.Millisecond))
		if least > variant.atMost {
			t.Errorf("%s: the fastest pod is Ready %v later, want at most %v", variant.name, least, variant.atMost)
		}
	}
}

// testRulesRefused checks that a namespace with the level baseline or restricted refuses a pod of mode
// rules because of the container that sets the rules, and for nothing else (I11).
func (c *cluster) testRulesRefused(t *testing.T) {
	for _, level := range []string{"baseline", "restricted"} {
		t.Run(level, func(t *testing.T) {
			s := c.space(t, map[string]string{"pod-security.kubernetes.io/enforce": level})
			var injected corev1.Pod
			injection{c, "rules", discoveryAddr, nil}.inject(t, s.name, app(), &injected)
			err := c.api.create(s.path("pods")+"?dryRun=All", &injected)
			if err == nil {
				t.Fatal("the pod was accepted")
			}
			t.Logf("%v", err)
			if !strings.Contains(err.Error(), `"nametap-capture"`) || strings.Contains(err.Error(), `"nametap"`) {
				t.Error("want the container nametap-capture alone")
			}
		})
	}
}
