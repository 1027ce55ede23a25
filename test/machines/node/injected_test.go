package node

import (
	"flag"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// An injection is a mode of `nametap inject`, or the webhook, with a control plane.
type injection struct {
	*cluster
	mode     string // "rules", "resolv" or "webhook"
	control  string // host:port
	settings string // more settings of `nametap inject`
}

// inject runs `nametap inject` for an object, and reads the result into out, which must have all its
// fields.
func (in injection) inject(t *testing.T, namespace string, object, out any) {
	t.Helper()
	text, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	config := in.Write("inject-"+namespace+".yaml", fmt.Sprintf("mode: %s\nnameservers: [%s]\ncontrolPlane: %q\nrootCAFiles: [%q]\n%s", in.mode, clusterIP, in.control, in.Path("root-cert.pem"), in.settings))
	cmd := exec.CommandContext(t.Context(), lab.Program(t, "nametap"), "inject", "--namespace", namespace, "--config", config)
	var stdout, stderr strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(string(text)), &stdout, &stderr
	if err := cmd.Run(); err != nil || !strings.Contains(stderr.String(), ": injected: ") {
		t.Fatalf("%v: %v\n%s", cmd, err, &stderr)
	}
	if err := yaml.UnmarshalStrict([]byte(stdout.String()), out); err != nil {
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

// space makes a namespace that enforces the strictest Pod Security level that the mode allows.
func (in injection) space(t *testing.T) *space {
	t.Helper()
	return in.cluster.space(t, map[string]string{"resolv": "pod-security.kubernetes.io/enforce: restricted", "webhook": "nametap.dev/inject: enabled"}[in.mode])
}

// test checks that the first query of an init container, and of the app, is answered, and what
// `nametap status` says.
func (in injection) test(t *testing.T) {
	t.Parallel()
	s := in.space(t)
	if in.mode == "webhook" { // nametap-discovery writes the caBundle
		lab.Until(t, "pods are injected", func() bool {
			var made corev1.Pod
			return s.Do(http.MethodPost, s.path("pods")+"?dryRun=All", app(), &made) == nil && len(made.Spec.InitContainers) > 0
		})
	}
	spec := app()
	spec.Spec.InitContainers = []corev1.Container{confine(s.asker(spec, "after", 500, "-for=1s"))}
	spec.Spec.Containers = append(spec.Spec.Containers, confine(s.asker(spec, "load", 500, "-for=5s")))
	p := in.pod(s, spec)
	p.wantRight("after", "load")
	p.has("db.example.com", "192.0.2.53")
	want := "capture        IPv4 redirected: an agent answers a test query"
	if in.mode == "resolv" {
		want = "capture        no rules are needed: the agent is the only nameserver of /etc/resolv.conf"
	}
	text := p.mustExec("nametap", "status")
	if !strings.Contains(text, want) || !strings.Contains(text, "connected to "+in.control) || strings.Contains(text, "not connected") || strings.Contains(text, "IPv4 not redirected") {
		t.Errorf("nametap status: want %q:\n%s", want, text)
	}
	p.notRestarted()
}

// testJobs checks that an injected Job completes when its app has ended, and so does the Job of a CronJob.
func (in injection) testJobs(t *testing.T) {
	t.Parallel()
	s := in.space(t)
	spec := app()
	spec.Spec.Containers = []corev1.Container{confine(s.asker(spec, "app", 500, "-for=2s"))}
	spec.Spec.RestartPolicy = corev1.RestartPolicyNever
	cron := batchv1.CronJob{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "CronJob"}, ObjectMeta: metav1.ObjectMeta{Name: "cron"}, Spec: batchv1.CronJobSpec{
		Schedule: "0 0 1 1 *", JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: spec.Spec}}},
	}}
	var injected batchv1.CronJob
	in.inject(t, s.name, cron, &injected)
	if err := s.Do(http.MethodPost, "/apis/batch/v1/namespaces/"+s.name+"/cronjobs", injected, nil); err != nil {
		t.Fatal(err)
	}
	s.Kubectl("--namespace="+s.name, "create", "job", "--from=cronjob/cron", "job")
	var pods corev1.PodList
	wait.Until(t, "the Job has a pod", func() bool {
		return s.Do(http.MethodGet, s.path("pods")+"?labelSelector=job-name=job", nil, &pods) == nil && len(pods.Items) > 0
	})
	(&pod{space: s, name: pods.Items[0].Name}).wantRight("app")
	wait.Until(t, "the Job is complete", func() bool {
		var now batchv1.Job
		s.Get("/apis/batch/v1/namespaces/"+s.name+"/jobs/job", &now)
		return now.Status.CompletionTime != nil
	})
}

// delayRounds is how often testInjectedDelay creates each pod. docs/performance.md has ten.
var delayRounds = flag.Int("node.rounds", 5, "how many pods of each kind are timed")

// testInjectedDelay measures how much later injected pods are Ready: the fastest of each kind, after the fastest without
// nametap.
func (c *cluster) testInjectedDelay(t *testing.T) {
	s := c.space(t, "")
	const nowhere = "172.30.0.99:15012"
	kinds := []struct {
		mode, control string
		atMost        time.Duration
		delays        []time.Duration
	}{
		{"", "", 0, nil}, {"rules", discoveryAddr, 3 * time.Second, nil}, {"resolv", discoveryAddr, 2 * time.Second, nil},
		{"rules", nowhere, 8 * time.Second, nil}, {"resolv", nowhere, 8 * time.Second, nil},
	}
	for i := range *delayRounds {
		for k := range kinds {
			kind := &kinds[k]
			spec := app()
			spec.Name = fmt.Sprintf("shop-%d-%d", k, i)
			if kind.mode != "" {
				plain := spec
				spec = new(corev1.Pod)
				injection{s.cluster, kind.mode, kind.control, ""}.inject(t, s.name, plain, spec)
			}
			p := s.create(spec)
			kind.delays = append(kind.delays, p.ready())
			if err := s.Do(http.MethodDelete, s.path("pods", p.name)+"?gracePeriodSeconds=0", nil, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, kind := range kinds {
		slices.Sort(kind.delays)
		later := kind.delays[0] - kinds[0].delays[0]
		t.Logf("mode %q with %q: Ready after %v (median), the fastest %v later", kind.mode, kind.control, kind.delays[len(kind.delays)/2], later)
		if later > kind.atMost {
			t.Errorf("mode %q with %q: the fastest pod is Ready %v later, want at most %v", kind.mode, kind.control, later, kind.atMost)
		}
	}
}
