package node

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

// shop is the pod of the manifest in the namespace default.
func (c *cluster) shop(t *testing.T) *pod {
	t.Helper()
	p := &pod{space: &space{cluster: c, t: t, name: "default"}, name: "shop"}
	p.ready()
	return p
}

// testManifest checks the pod that the manifest of nametap-discovery makes.
func (c *cluster) testManifest(t *testing.T) {
	shop := c.shop(t)
	wait.Until(t, "the ServiceEntry is in the table", func() bool {
		answer, err := shop.exec("nametap", "nametap", "query", "db.example.com")
		return err == nil && strings.Contains(answer, "192.0.2.53")
	})
	status := shop.mustExec("nametap", "nametap", "status")
	t.Logf("nametap status in the pod:\n%s", status)
	if !strings.Contains(status, "connected to nametap-discovery.nametap-system.svc:15012") || !strings.Contains(status, "IPv4 redirected") {
		t.Errorf("nametap status: %s", status)
	}
	// I0: the agent's container cannot read the rules, and says what is captured.
	for _, text := range []string{status, shop.mustExec("nametap", "nametap", "capture", "status")} {
		if !strings.Contains(text, "IPv4 redirected: an agent answers a test query") {
			t.Errorf("the status does not say that IPv4 is captured: %s", text)
		}
	}
	// With glibc, as most programs do.
	if answer := shop.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("getent: %s", answer)
	}
}

// testDelay measures how much later a pod of the manifest is Ready with nametap (I0).
func (c *cluster) testDelay(t *testing.T) {
	compareDelays(t, c.space(t, nil), func() *corev1.Pod { return podOf(t, "discovery") }, []delay{
		{name: "without nametap", change: func(spec *corev1.Pod) { spec.Spec.InitContainers = nil }},
		{name: "with two containers in place of nametap's that do nothing", change: idle, atMost: 3 * time.Second},
		{name: "with nametap", change: func(*corev1.Pod) {}, atMost: 3 * time.Second},
		{name: "with nametap, without its control plane", change: away, atMost: 8 * time.Second},
	})
}

// idle replaces the sidecar by one that sleeps, and `capture apply` by a program that ends at once.
// The delay of such a pod is the time of kubelet and containerd.
func idle(spec *corev1.Pod) {
	for i, command := range [][]string{{"sleep", "infinity"}, {"true"}} {
		c := &spec.Spec.InitContainers[i]
		c.Image, c.Command, c.Args = spec.Spec.Containers[0].Image, command, nil
		c.SecurityContext, c.ReadinessProbe, c.LivenessProbe = nil, nil, nil
	}
}

// away gives a pod a control plane at an address where no machine is.
func away(spec *corev1.Pod) {
	for key, text := range spec.Annotations {
		spec.Annotations[key] = strings.Replace(text, "nametap-discovery.nametap-system.svc:15012", "172.30.0.99:15012", 1)
	}
}

// firstQuery is the check of a manifest, "discovery" or "istiod".
type firstQuery struct {
	*cluster
	variant string
}

// test checks that init containers run in their order, and that the first query of
// an init container after nametap's, and of the app, is answered (I0).
func (c firstQuery) test(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, c.variant)
	before := s.asker(spec, "before", 200, "-for=500ms", "-expect=/questions/forwarded.json")
	after := s.asker(spec, "after", 500, "-for=1s")
	spec.Spec.InitContainers = slices.Concat([]corev1.Container{before}, spec.Spec.InitContainers, []corev1.Container{after})
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", 500, "-for=5s"))
	p := s.create(spec)
	names := []string{"before", "after", "load"}
	for _, name := range names {
		report := p.report(name)
		t.Logf("%s: %v", name, report)
		if report.Bad() > 0 || report.Queries < 50 {
			t.Errorf("%s: %d of %d queries have no right answer", name, report.Bad(), report.Queries)
		}
	}
	now := p.now()
	times := []time.Time{
		status(now, "before").State.Terminated.FinishedAt.Time, status(now, "nametap").State.Running.StartedAt.Time,
		status(now, "nametap-capture").State.Terminated.FinishedAt.Time, status(now, "after").State.Terminated.StartedAt.Time,
		status(now, "after").State.Terminated.FinishedAt.Time, status(now, "app").State.Running.StartedAt.Time,
	}
	if !slices.IsSortedFunc(times, time.Time.Compare) {
		t.Errorf("the containers did not run in their order: %v", times)
	}
	if answer := p.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("getent: %s", answer)
	}
	if status := p.mustExec("nametap", "nametap", "status"); !strings.Contains(status, "connected to") || strings.Contains(status, "not connected") {
		t.Errorf("nametap status: %s", status)
	}
	all, anonymous := c.cgroups.memory(t, containerID(now, "nametap"))
	t.Logf("the agent's cgroup uses %.1f MiB, %.1f MiB of them not for files", mebibytes(all), mebibytes(anonymous))
}

// jobOf returns a Job with the pod of the manifest, whose app asks for two seconds.
func (s *space) jobOf() batchv1.JobSpec {
	s.t.Helper()
	spec := podOf(s.t, "discovery")
	spec.Spec.Containers = []corev1.Container{s.asker(spec, "app", 500, "-for=2s")}
	spec.Spec.RestartPolicy = corev1.RestartPolicyNever
	return batchv1.JobSpec{Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: spec.Annotations}, Spec: spec.Spec}}
}

// finished waits until the pod of a job has succeeded, and checks what its app reports.
func (s *space) finished(job batchv1.Job) {
	s.t.Helper()
	var pods corev1.PodList
	wait.Until(s.t, "the job has a pod", func() bool {
		err := s.api.get(s.path("pods")+"?labelSelector=job-name="+job.Name, &pods)
		return err == nil && len(pods.Items) > 0
	})
	p := &pod{space: s, name: pods.Items[0].Name}
	report := p.report("app")
	now := p.await("the pod of the job has ended", func(now *corev1.Pod) bool {
		return now.Status.Phase == corev1.PodSucceeded || now.Status.Phase == corev1.PodFailed
	})
	s.t.Logf("%s: the app ended %v before the sidecar; %v", now.Status.Phase,
		status(now, "nametap").State.Terminated.FinishedAt.Sub(status(now, "app").State.Terminated.FinishedAt.Time), report)
	if now.Status.Phase != corev1.PodSucceeded || report.Bad() > 0 {
		s.t.Errorf("the pod has %s, and %d queries of its app have no right answer", now.Status.Phase, report.Bad())
	}
}

// testJob checks that a Job completes (I6).
func (c *cluster) testJob(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	job := batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: s.jobOf()}
	jobs := "/apis/batch/v1/namespaces/" + s.name + "/jobs"
	begun := time.Now()
	if err := c.api.create(jobs, job); err != nil {
		t.Fatal(err)
	}
	s.finished(job)
	wait.Until(t, "the Job is complete", func() bool {
		var now batchv1.Job
		return c.api.get(jobs+"/job", &now) == nil && now.Status.CompletionTime != nil
	})
	t.Logf("the Job is complete after %v", time.Since(begun).Round(time.Millisecond))
}

// testCronJob checks that a CronJob's jobs complete (I6).
func (c *cluster) testCronJob(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	cron := batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Name: "cron"}, Spec: batchv1.CronJobSpec{
		Schedule: "* * * * *", JobTemplate: batchv1.JobTemplateSpec{Spec: s.jobOf()},
	}}
	s.finished(s.firstJob(cron))
}

// firstJob creates a CronJob, and waits until it has started a Job. The CronJob is deleted at the end of
// the check.
func (s *space) firstJob(cron batchv1.CronJob) batchv1.Job {
	s.t.Helper()
	batch := "/apis/batch/v1/namespaces/" + s.name
	if err := s.api.create(batch+"/cronjobs", cron); err != nil {
		s.t.Fatal(err)
	}
	var jobs batchv1.JobList
	deadline := time.Now().Add(2 * time.Minute) // it starts with the next minute
	for len(jobs.Items) == 0 && time.Now().Before(deadline) {
		if err := s.api.get(batch+"/jobs", &jobs); err != nil {
			s.t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) //nolint:forbidigo // up to a minute; the API server has other work
	}
	if len(jobs.Items) == 0 {
		s.t.Fatal("the CronJob has started no Job")
	}
	s.t.Cleanup(func() { s.api.delete(s.t, batch+"/cronjobs/"+cron.Name) })
	return jobs.Items[0]
}

// testControlPlaneAway checks that a pod starts without its control plane, and that forwarded
// names are answered from the app's first instant (I0).
func (c *cluster) testControlPlaneAway(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	away(spec)
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", 200, "-for=15s", "-expect=/questions/forwarded.json"))
	p := s.create(spec)
	ready := p.ready()
	report := p.report("load")
	t.Logf("Ready after %v; %v", ready.Round(time.Millisecond), report)
	if report.Bad() > 0 {
		t.Errorf("%d of %d queries have no right answer", report.Bad(), report.Queries)
	}
	if status := p.mustExec("nametap", "nametap", "status"); !strings.Contains(status, "not connected to 172.30.0.99:15012") {
		t.Errorf("nametap status: %s", status)
	}
}

// testDeletion checks that the app of a pod that is deleted has DNS to its end: here for some
// seconds after SIGTERM.
func (c *cluster) testDeletion(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	asker := s.asker(spec, "app", 200)
	// The shell stays, and does not pass on the signal.
	asker.Command = []string{"sh", "-c", "trap : TERM; " + strings.Join(append(asker.Command, "-for=15s"), " ") + " & wait; wait"}
	spec.Spec.Containers = []corev1.Container{asker}
	p := s.create(spec)
	running := p.await("the app runs", func(now *corev1.Pod) bool { return status(now, "app").State.Running != nil })
	logs := make(chan string, 1)
	go func() { // the log is gone with the pod
		var text string
		if err := c.api.get(p.path("pods", p.name, "log")+"?container=app&follow=true", &text); err != nil {
			text = err.Error()
		}
		logs <- text
	}()
	began := status(running, "app").State.Running.StartedAt.Time
	c.api.delete(t, p.path("pods", p.name))
	deleted := time.Now()
	text := wait.For(t, "the app has ended", logs)
	var report load.Report
	if err := json.Unmarshal([]byte(text), &report); err != nil {
		t.Fatalf("the report of nametap-load: %v\n%s", err, text)
	}
	t.Logf("deleted %v after the app's start: %v", deleted.Sub(began).Round(time.Second), report)
	if report.Bad() > 0 || report.Ended.Sub(deleted) < time.Second {
		t.Errorf("%d queries have no right answer; the app ended %v after the deletion", report.Bad(), report.Ended.Sub(deleted))
	}
	ended := time.Now()
	wait.Until(t, "the pod has ended", func() bool { _, err := p.get(); return err != nil })
	t.Logf("the pod ended %v after its app", time.Since(ended).Round(time.Millisecond))
}
