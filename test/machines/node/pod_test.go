package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

// manifest returns the text of a manifest in deploy/kubernetes.
func manifest(t *testing.T, variant string) string {
	t.Helper()
	return string(readFile(t, "../../../deploy/kubernetes/"+variant+".yaml"))
}

// podOf returns the pod of a manifest.
func podOf(t *testing.T, variant string) *corev1.Pod {
	t.Helper()
	for document := range strings.SplitSeq(manifest(t, variant), "\n---\n") {
		pod := new(corev1.Pod)
		if err := yaml.Unmarshal([]byte(document), pod); err != nil {
			t.Fatalf("%s: %v", variant, err)
		}
		if pod.Kind == "Pod" {
			return pod
		}
	}
	t.Fatalf("%s.yaml has no pod", variant)
	return nil
}

// A space is a namespace of Kubernetes that a check has for itself.
type space struct {
	*cluster
	t    *testing.T
	name string
}

// space makes a namespace for a check. When the check has ended, its pods are deleted, and if
// it failed, their logs are kept.
func (c *cluster) space(t *testing.T, labels map[string]string) *space {
	t.Helper()
	short := func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' {
			return r
		}
		return '-'
	}
	_, name, _ := strings.Cut(strings.ToLower(t.Name()), "/")
	s := &space{c, t, strings.Trim(strings.Map(short, name[:min(len(name), 50)]), "-")}
	namespace := corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.name, Labels: labels}}
	if err := c.api.create("/api/v1/namespaces", namespace); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.keepLogs()
		}
		if err := c.api.do(http.MethodDelete, s.path("pods")+"?gracePeriodSeconds=0", nil, nil); err != nil {
			t.Errorf("deleting the pods: %v", err)
		}
	})
	return s
}

// path returns the path of objects in the API.
func (s *space) path(elements ...string) string {
	return "/api/v1/namespaces/" + s.name + "/" + strings.Join(elements, "/")
}

// keepLogs writes what kubectl tells of the namespace to the work directory.
func (s *space) keepLogs() {
	s.t.Helper()
	var text strings.Builder
	for _, args := range [][]string{{"describe", "pods"}, {"get", "events"}} {
		cmd := s.command(context.Background(), append(s.kubectl, append(args, "--namespace="+s.name)...)...)
		cmd.Stdout, cmd.Stderr = &text, &text
		_ = cmd.Run()
	}
	var pods corev1.PodList
	if err := s.api.get(s.path("pods"), &pods); err != nil {
		fmt.Fprintln(&text, err)
	}
	for _, p := range pods.Items {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, previous := range []bool{true, false} {
				log, err := (&pod{space: s, name: p.Name}).log(c.Name, previous)
				fmt.Fprintf(&text, "\n--- %s %s previous=%v %v\n%s", p.Name, c.Name, previous, err, log)
			}
		}
	}
	path := s.cluster.path(s.name + ".pods")
	_ = os.WriteFile(path, []byte(text.String()), 0o644)
	s.t.Logf("descriptions and logs of the pods are in %s", path)
}

// A pod is a pod of a check. t is the test that waits for it.
type pod struct {
	*space
	name    string
	created time.Time
}

// create creates a pod.
func (s *space) create(spec *corev1.Pod) *pod {
	s.t.Helper()
	p := &pod{space: s, name: spec.Name}
	var err error
	wait.Until(s.t, "the pod is accepted", func() bool {
		p.created = time.Now()
		err = s.api.create(s.path("pods"), spec)
		// The controllers make a namespace's account soon.
		return err == nil || !strings.Contains(err.Error(), "serviceaccount")
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// get returns the pod as the API server has it.
func (p *pod) get() (*corev1.Pod, error) {
	pod := new(corev1.Pod)
	return pod, p.api.get(p.path("pods", p.name), pod)
}

// await waits for a condition of the pod, and returns the pod.
func (p *pod) await(what string, condition func(*corev1.Pod) bool) *corev1.Pod {
	p.t.Helper()
	var now *corev1.Pod
	deadline := time.Now().Add(3 * wait.Limit)
	for {
		var err error
		now, err = p.get()
		if err == nil && condition(now) {
			return now
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("timed out waiting: %s; %v", what, summary(now))
		}
		time.Sleep(20 * time.Millisecond) //nolint:forbidigo // the API server is to have the processor for more than these queries
	}
}

// ready waits until the pod is ready, and returns how long that took.
func (p *pod) ready() time.Duration {
	p.t.Helper()
	p.await("pod "+p.name+" is ready", func(now *corev1.Pod) bool {
		for _, c := range now.Status.Conditions {
			if c.Type == corev1.PodReady {
				return c.Status == corev1.ConditionTrue
			}
		}
		return false
	})
	return time.Since(p.created)
}

// summary describes the containers of a pod.
func summary(now *corev1.Pod) string {
	if now == nil {
		return "no pod"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s", now.Name, now.Status.Phase, now.Status.Message)
	for _, c := range slices.Concat(now.Status.InitContainerStatuses, now.Status.ContainerStatuses) {
		state, _ := json.Marshal(c.State)
		fmt.Fprintf(&b, "\n\t%s: ready %v, %d restarts, %s", c.Name, c.Ready, c.RestartCount, state)
	}
	return b.String()
}

// status returns the status of a container.
func status(now *corev1.Pod, name string) corev1.ContainerStatus {
	for _, c := range slices.Concat(now.Status.InitContainerStatuses, now.Status.ContainerStatuses) {
		if c.Name == name {
			return c
		}
	}
	return corev1.ContainerStatus{}
}

// log returns the log of a container.
func (p *pod) log(container string, previous bool) (string, error) {
	var text string
	err := p.api.get(p.path("pods", p.name, "log")+"?container="+container+"&previous="+strconv.FormatBool(previous), &text)
	return text, err
}

// exec runs a command in a container, as kubectl exec does.
func (p *pod) exec(container string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	defer cancel()
	args = append([]string{"exec", "--namespace=" + p.space.name, p.name, "--container=" + container, "--"}, args...)
	output, err := p.command(ctx, append(p.kubectl, args...)...).CombinedOutput()
	return string(output), err
}

// mustExec is like exec and fails the test if the command fails.
func (p *pod) mustExec(container string, args ...string) string {
	p.t.Helper()
	output, err := p.exec(container, args...)
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return output
}

// pid returns the process ID of a container's first process.
func (p *pod) pid(container string) int {
	p.t.Helper()
	pid := 0
	wait.Until(p.t, "the container "+container+" runs", func() bool {
		now, err := p.get()
		if err != nil {
			return false
		}
		id := containerID(now, container)
		groups, err := filepath.Glob("/proc/[0-9]*/cgroup")
		if err != nil || id == "" {
			return false
		}
		for _, path := range groups {
			text, err := os.ReadFile(path)
			if err != nil || !strings.Contains(string(text), id) {
				continue
			}
			stat, err := os.ReadFile(filepath.Join(filepath.Dir(path), "status"))
			if err != nil || !slices.ContainsFunc(slices.Collect(strings.Lines(string(stat))), func(line string) bool {
				fields := strings.Fields(line)
				return fields[0] == "NSpid:" && fields[len(fields)-1] == "1"
			}) {
				continue
			}
			pid, err = strconv.Atoi(filepath.Base(filepath.Dir(path)))
			return err == nil
		}
		return false
	})
	return pid
}

// containerID returns the ID of a container that has started, or "".
func containerID(now *corev1.Pod, container string) string {
	return strings.TrimPrefix(status(now, container).ContainerID, "containerd://")
}

// agent returns the process ID of the agent, the child of the supervisor.
func (p *pod) agent() int {
	p.t.Helper()
	supervisor := p.pid("nametap")
	child := 0
	wait.Until(p.t, "the supervisor has an agent", func() bool {
		children := process.Children(supervisor)
		if len(children) == 1 {
			child = children[0]
		}
		return child != 0
	})
	return child
}

// Names and their right answers.
var (
	meshName  = load.Question{Name: "db.example.com", Addresses: load.Addrs("192.0.2.53")}
	forwarded = load.Question{Name: "*.example.org", Addresses: load.Addrs(strangersIP)}
)

// asker returns a container that asks at a rate from its first instant, for a time or until
// SIGTERM, and puts a report in its log. The pod gets its questions as a ConfigMap.
func (s *space) asker(spec *corev1.Pod, name string, rate int, args ...string) corev1.Container {
	s.t.Helper()
	questions := corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "questions"}, Data: map[string]string{
		"all.json": questions(s.t, meshName, forwarded), "mesh.json": questions(s.t, meshName), "forwarded.json": questions(s.t, forwarded),
	}}
	if err := s.api.create(s.path("configmaps"), questions); err != nil && !strings.Contains(err.Error(), "already exists") {
		s.t.Fatal(err)
	}
	if !slices.ContainsFunc(spec.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "questions" }) {
		volume := corev1.Volume{Name: "questions"}
		volume.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "questions"}}
		spec.Spec.Volumes = append(spec.Spec.Volumes, volume)
	}
	never := corev1.ContainerRestartPolicyNever // after a restart, kubelet may have removed the report
	return corev1.Container{
		Name: name, Image: loadImage, RestartPolicy: &never,
		Command:      append([]string{"nametap-load", "-rate=" + strconv.Itoa(rate), "-expect=/questions/all.json"}, args...),
		VolumeMounts: []corev1.VolumeMount{{Name: "questions", MountPath: "/questions"}},
	}
}

// questions returns questions as nametap-load reads them.
func questions(t *testing.T, questions ...load.Question) string {
	t.Helper()
	text, err := json.Marshal(&load.Expectation{Questions: questions, Foreign: []netip.Prefix{netip.MustParsePrefix(strangersIP + "/32")}})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// report returns the report of an asker, when it has ended.
func (p *pod) report(container string) load.Report {
	p.t.Helper()
	p.await(container+" has ended", func(now *corev1.Pod) bool {
		s := status(now, container)
		return s.State.Terminated != nil || s.LastTerminationState.Terminated != nil
	})
	var report load.Report
	wait.Until(p.t, "containerd has written the report of "+container, func() bool {
		text, err := p.log(container, status(p.now(), container).State.Terminated == nil)
		return err == nil && json.Unmarshal([]byte(text), &report) == nil
	})
	return report
}

// stop ends an asker, and returns its report.
func (p *pod) stop(container string) load.Report {
	p.t.Helper()
	p.kill(p.pid(container), syscall.SIGTERM)
	return p.report(container)
}

// now returns the pod as the API server has it.
func (p *pod) now() *corev1.Pod {
	p.t.Helper()
	now, err := p.get()
	if err != nil {
		p.t.Fatal(err)
	}
	return now
}

// kill sends a signal to a process of the pod.
func (p *pod) kill(pid int, signal syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(pid, signal); err != nil {
		p.t.Fatalf("sending %v to process %d: %v", signal, pid, err)
	}
}
