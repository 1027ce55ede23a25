package node

import (
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
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

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
func (c *cluster) space(t *testing.T, labels string) *space {
	t.Helper()
	short := func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' {
			return r
		}
		return '-'
	}
	_, name, _ := strings.Cut(strings.ToLower(t.Name()), "/")
	s := &space{c.in(t), t, strings.Trim(strings.Map(short, name[:min(len(name), 50)]), "-")}
	s.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + s.name + ", labels: {" + labels + "}}\n")
	// For the pod of discovery.yaml.
	s.Apply(fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: nametap-ca-root-cert, namespace: %s}\ndata: {root-cert.pem: %q}\n", s.name, c.root()))
	t.Cleanup(func() {
		if t.Failed() {
			s.keepLogs()
		}
		if err := c.Do(http.MethodDelete, s.path("pods")+"?gracePeriodSeconds=0", nil, nil); err != nil {
			t.Errorf("deleting the pods: %v", err)
		}
	})
	return s
}

// path returns the path of objects in the API.
func (s *space) path(elements ...string) string {
	return "/api/v1/namespaces/" + s.name + "/" + strings.Join(elements, "/")
}

// keepLogs writes what kubectl tells of the namespace to the directory of the node.
func (s *space) keepLogs() {
	s.t.Helper()
	var text strings.Builder
	for _, command := range []string{"describe pods", "get events"} {
		output, _ := s.TryKubectl(append(strings.Fields(command), "--namespace="+s.name)...)
		text.WriteString(output)
	}
	var pods corev1.PodList
	_ = s.Do(http.MethodGet, s.path("pods"), nil, &pods)
	for _, p := range pods.Items {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, previous := range []bool{true, false} {
				log, err := (&pod{space: s, name: p.Name}).log(c.Name, previous)
				fmt.Fprintf(&text, "\n--- %s %s previous=%v %v\n%s", p.Name, c.Name, previous, err, log)
			}
		}
	}
	s.t.Logf("descriptions and logs of the pods are in %s", s.Write(s.name+".pods", text.String()))
}

// A pod is a pod of a check.
type pod struct {
	*space
	name    string
	created time.Time
}

// create creates a pod.
func (s *space) create(spec *corev1.Pod) *pod {
	s.t.Helper()
	p := &pod{space: s, name: spec.Name}
	wait.Until(s.t, "the pod is accepted", func() bool {
		p.created = time.Now()
		err := s.Do(http.MethodPost, s.path("pods"), spec, nil)
		// The controllers make a namespace's account soon.
		if err != nil && !strings.Contains(err.Error(), "serviceaccount") {
			s.t.Fatal(err)
		}
		return err == nil
	})
	return p
}

// now returns the pod as the API server has it.
func (p *pod) now() *corev1.Pod {
	p.t.Helper()
	pod := new(corev1.Pod)
	p.Get(p.path("pods", p.name), pod)
	return pod
}

// await waits for a condition of the pod.
func (p *pod) await(what string, condition func(*corev1.Pod) bool) {
	p.t.Helper()
	lab.Until(p.t, what, func() bool { return condition(p.now()) })
}

// ready waits until the pod is ready, and returns how long that took.
func (p *pod) ready() time.Duration {
	p.t.Helper()
	p.await("pod "+p.name+" is ready", func(now *corev1.Pod) bool {
		return slices.ContainsFunc(now.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
	})
	return time.Since(p.created)
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
func (p *pod) log(container string, previous bool) (text string, err error) {
	err = p.Do(http.MethodGet, p.path("pods", p.name, "log")+"?container="+container+"&previous="+strconv.FormatBool(previous), nil, &text)
	return text, err
}

// exec runs a command in a container.
func (p *pod) exec(container string, args ...string) (string, error) {
	return p.TryKubectl(append([]string{"exec", "--namespace=" + p.space.name, p.name, "--container=" + container, "--"}, args...)...)
}

// mustExec runs a command in the container of the agent. It fails the test if the command fails.
func (p *pod) mustExec(args ...string) string {
	p.t.Helper()
	output, err := p.exec("nametap", args...)
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return output
}

// has waits until a program of the pod looks up an address of a name, with glibc, as most programs do.
func (p *pod) has(name, address string) {
	p.t.Helper()
	wait.Until(p.t, "the app has "+address+" for "+name, func() bool {
		answer, err := p.exec("app", "getent", "ahostsv4", name)
		return err == nil && strings.HasPrefix(answer, address)
	})
}

// pid returns the process ID of a container's first process.
func (p *pod) pid(container string) (pid int) {
	p.t.Helper()
	wait.Until(p.t, "the container "+container+" runs", func() bool {
		id := strings.TrimPrefix(status(p.now(), container).ContainerID, "containerd://")
		groups, err := filepath.Glob("/proc/[0-9]*/cgroup")
		if err != nil || id == "" {
			return false
		}
		for _, path := range groups {
			if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), id) {
				continue
			}
			status, err := os.ReadFile(filepath.Join(filepath.Dir(path), "status"))
			_, inside, found := strings.Cut(string(status), "\nNSpid:")
			inside, _, _ = strings.Cut(inside, "\n")
			if err != nil || !found || !strings.HasSuffix(inside, "\t1") {
				continue
			}
			pid, err = strconv.Atoi(filepath.Base(filepath.Dir(path)))
			return err == nil
		}
		return false
	})
	return pid
}

// agent returns the process ID of the agent, the child of the supervisor.
func (p *pod) agent() (child int) {
	p.t.Helper()
	supervisor := p.pid("nametap")
	wait.Until(p.t, "the supervisor has an agent", func() bool {
		if children := process.Children(supervisor); len(children) == 1 {
			child = children[0]
		}
		return child != 0
	})
	return child
}

// replaced waits until the supervisor runs another agent than pid.
func (p *pod) replaced(supervisor, pid int) {
	p.t.Helper()
	wait.Until(p.t, "the supervisor has replaced the agent", func() bool {
		children := process.Children(supervisor)
		return len(children) == 1 && children[0] != pid
	})
}

// connected waits until the agent is connected to a control plane whose name begins with prefix.
func (p *pod) connected(prefix string) {
	p.t.Helper()
	wait.Until(p.t, "the agent is connected", func() bool {
		status, err := p.exec("nametap", "nametap", "status")
		return err == nil && strings.Contains(status, "connected to "+prefix) && !strings.Contains(status, "not connected")
	})
}

// kill sends a signal to a process of the pod.
func (p *pod) kill(pid int, signal syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(pid, signal); err != nil {
		p.t.Fatalf("sending %v to process %d: %v", signal, pid, err)
	}
}

// notRestarted fails the test if kubelet has restarted the agent's container.
func (p *pod) notRestarted() {
	p.t.Helper()
	if restarts := status(p.now(), "nametap").RestartCount; restarts > 0 {
		p.t.Errorf("kubelet has restarted the agent's container %d times", restarts)
	}
}

// asker returns a container that asks at a rate from its first instant, for a time or until
// SIGTERM, and puts a report in its log. The pod gets its questions as a ConfigMap.
func (s *space) asker(spec *corev1.Pod, name string, rate int, args ...string) corev1.Container {
	s.t.Helper()
	questions := func(questions ...load.Question) string {
		text, err := json.Marshal(&load.Expectation{Questions: questions, Foreign: []netip.Prefix{netip.MustParsePrefix(strangersIP + "/32")}})
		if err != nil {
			s.t.Fatal(err)
		}
		return string(text)
	}
	mesh := load.Question{Name: "db.example.com", Addresses: load.Addrs("192.0.2.53")}
	forwarded := load.Question{Name: "*.example.org", Addresses: load.Addrs(strangersIP)}
	s.Apply(fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: questions, namespace: %s}\ndata: {all.json: %q, mesh.json: %q, forwarded.json: %q}\n",
		s.name, questions(mesh, forwarded), questions(mesh), questions(forwarded)))
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

// loaded starts the pod of the manifest with an app that asks at a rate.
func (s *space) loaded(spec *corev1.Pod, rate int, args ...string) *pod {
	s.t.Helper()
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", rate, args...))
	p := s.create(spec)
	p.ready()
	return p
}

// report returns the report of an asker, when it has ended.
func (p *pod) report(container string) (report load.Report) {
	p.t.Helper()
	p.await(container+" has ended", func(now *corev1.Pod) bool {
		s := status(now, container)
		return s.State.Terminated != nil || s.LastTerminationState.Terminated != nil
	})
	wait.Until(p.t, "containerd has written the report of "+container, func() bool {
		text, err := p.log(container, status(p.now(), container).State.Terminated == nil)
		return err == nil && json.Unmarshal([]byte(text), &report) == nil
	})
	p.t.Logf("%s: %v", container, report)
	return report
}

// stop ends an asker, and returns its report.
func (p *pod) stop(container string) load.Report {
	p.t.Helper()
	p.kill(p.pid(container), syscall.SIGTERM)
	return p.report(container)
}

// wantRight fails the test if a query of askers that end by themselves has no right answer.
func (p *pod) wantRight(containers ...string) {
	p.t.Helper()
	for _, name := range containers {
		if report := p.report(name); report.Bad() > 0 || report.Queries < 50 {
			p.t.Errorf("%s: %d of %d queries have no right answer", name, report.Bad(), report.Queries)
		}
	}
}

// noneLost ends the load, and fails the test if a query has no right answer.
func (p *pod) noneLost() {
	p.t.Helper()
	if report := p.stop("load"); report.Bad() > 0 {
		p.t.Errorf("%d of %d queries have no right answer", report.Bad(), report.Queries)
	}
}
