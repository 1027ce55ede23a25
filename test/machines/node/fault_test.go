package node

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// loaded starts the pod of the manifest with an app that asks at a rate.
func (s *space) loaded(spec *corev1.Pod, rate int, args ...string) *pod {
	s.t.Helper()
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "load", rate, args...))
	p := s.create(spec)
	p.ready()
	return p
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

// noneLost ends the load, and fails the test if a query has no right answer.
func (p *pod) noneLost() {
	p.t.Helper()
	report := p.stop("load")
	p.t.Logf("%v", report)
	if report.Bad() > 0 {
		p.t.Errorf("%d of %d queries have no right answer", report.Bad(), report.Queries)
	}
}

// notRestarted fails the test if kubelet has restarted the agent's container.
func (p *pod) notRestarted() {
	p.t.Helper()
	if restarts := status(p.now(), "nametap").RestartCount; restarts > 0 {
		p.t.Errorf("kubelet has restarted the agent's container %d times", restarts)
	}
}

// killing is the check that kills agents.
type killing struct {
	*cluster
	calm bool // each agent has answered queries before it is killed; otherwise it is still starting
}

// test kills the agent again and again, and checks that DNS is never away (K15).
func (c killing) test(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	// Queries wait in the sockets, so queries for mesh names over UDP are late, but not lost.
	// Queries that the agent has forwarded, and its TCP connections, end with it.
	spec.Spec.Containers = append(spec.Spec.Containers, s.asker(spec, "mesh", 200, "-expect=/questions/mesh.json", "-tcp=0"))
	p := s.loaded(spec, 100)
	supervisor := p.pid("nametap")
	for range 5 {
		agent := p.agent()
		p.kill(agent, syscall.SIGKILL)
		p.replaced(supervisor, agent)
		if c.calm {
			p.connected("")
		}
	}
	if answer := p.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("after the last death: %s", answer)
	}
	mesh := p.stop("mesh")
	t.Logf("mesh names over UDP: gone for %v at most; %v", mesh.LongestGap.Round(time.Millisecond), mesh)
	t.Logf("all names, also over TCP: %v", p.stop("load"))
	if mesh.Bad() > 0 || mesh.LongestGap > 5*time.Second {
		t.Errorf("%d of %d queries have no right answer; DNS was away for %v", mesh.Bad(), mesh.Queries, mesh.LongestGap)
	}
	p.notRestarted()
}

// testSupervisorKilled kills the process that only kubelet can replace, which waits longer each
// time.
func (c *cluster) testSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	p := s.loaded(podOf(t, "discovery"), 100)
	for i := range int32(3) {
		supervisor := p.pid("nametap")
		begun := time.Now()
		p.kill(supervisor, syscall.SIGKILL)
		p.await("kubelet has restarted the container", func(now *corev1.Pod) bool {
			nametap := status(now, "nametap")
			return nametap.RestartCount == i+1 && nametap.State.Running != nil
		})
		t.Logf("death %d: kubelet restarted the container within %v", i+1, time.Since(begun).Round(time.Millisecond))
		wait.Until(t, "the app has DNS", func() bool {
			answer, err := p.exec("app", "getent", "ahostsv4", "db.example.com")
			return err == nil && strings.Contains(answer, "192.0.2.53")
		})
	}
	report := p.stop("load")
	t.Logf("DNS was away for %v at most; %v", report.LongestGap.Round(time.Millisecond), report)
}

// testAgentHangs stops the agent's process, and checks that it is replaced within 30 s (K15).
func (c *cluster) testAgentHangs(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	p := s.loaded(podOf(t, "discovery"), 100, "-timeout=30s")
	supervisor, agent := p.pid("nametap"), p.agent()
	begun := time.Now()
	p.kill(agent, syscall.SIGSTOP)
	p.replaced(supervisor, agent)
	took := time.Since(begun)
	t.Logf("the agent was replaced after %v", took.Round(time.Millisecond))
	if took > 30*time.Second {
		t.Errorf("the agent was replaced after %v, want at most 30s", took)
	}
	if answer := p.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("afterwards: %s", answer)
	}
	report := p.stop("load")
	t.Logf("with a timeout of 30 s: %v", report)
	if report.Bad() > report.Queries/20 { // the agent had some of them, before it hung
		t.Errorf("%d of %d queries have no right answer, though they could wait", report.Bad(), report.Queries)
	}
	p.notRestarted()
}

// testSupervisorHangs stops the supervisor's process, the first one of its container, and checks
// that the agent continues it (K15).
func (c *cluster) testSupervisorHangs(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	p := s.loaded(podOf(t, "discovery"), 100)
	supervisor := p.pid("nametap")
	begun := time.Now()
	p.kill(supervisor, syscall.SIGSTOP)
	wait.Until(t, "the supervisor continues", func() bool {
		_, state, _ := strings.Cut(string(readFile(t, fmt.Sprintf("/proc/%d/status", supervisor))), "State:")
		return !strings.HasPrefix(strings.TrimSpace(state), "T")
	})
	t.Logf("the supervisor was continued after %v", time.Since(begun).Round(time.Millisecond))
	p.noneLost()
	p.notRestarted()
}

// testMemory measures the memory of the agent's cgroup with 10,000 hosts.
func (c *cluster) testMemory(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	var objects strings.Builder
	for i := range 100 {
		fmt.Fprintf(&objects, "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: many-%d, namespace: %s}\n"+
			"spec:\n  exportTo: [.]\n  addresses: [192.0.2.%d]\n  ports: [{number: 80, name: http, protocol: HTTP}]\n  resolution: STATIC\n  hosts:\n", i, s.name, i+100)
		for host := range 100 {
			fmt.Fprintf(&objects, "  - h%d.many-%d.example.com\n", host, i)
		}
	}
	c.apply(t, objects.String())
	p := s.loaded(podOf(t, "discovery"), 100)
	for _, when := range []string{"at first", "after the agent was killed"} {
		wait.Until(t, "the agent has all hosts", func() bool {
			status, err := p.exec("nametap", "nametap", "status")
			_, hosts, _ := strings.Cut(status, "\nhosts ")
			hosts, _, _ = strings.Cut(strings.TrimSpace(hosts), "\n")
			n, err2 := strconv.Atoi(hosts)
			return err == nil && err2 == nil && n > 10_000
		})
		all, anonymous := c.cgroups.memory(t, containerID(p.now(), "nametap"))
		t.Logf("%s: the agent's cgroup uses %.1f MiB, %.1f MiB of them not for files", when, mebibytes(all), mebibytes(anonymous))
		if limit := int64(64 << 20); anonymous > limit { // what the manifest requests, of 192 MiB
			t.Errorf("%s: %.1f MiB, want at most %.1f MiB", when, mebibytes(anonymous), mebibytes(limit))
		}
		supervisor, agent := p.pid("nametap"), p.agent()
		p.kill(agent, syscall.SIGKILL)
		p.replaced(supervisor, agent)
	}
	t.Logf("%v", p.stop("load"))
	p.notRestarted()
}

// testToken lets kubelet renew the projected token, and checks that the agent connects with
// the new one. A kubelet that was restarted renews all tokens.
func (c *cluster) testToken(t *testing.T) {
	s := c.space(t, nil)
	p := s.loaded(podOf(t, "istiod"), 200)
	path := fmt.Sprintf("/proc/%d/root/var/run/secrets/tokens/istio-token", p.pid("nametap"))
	token := func() string { return string(readFile(t, path)) }
	first := token()
	begun := time.Now()
	c.kubelet.restart(t)
	p.awaitFile(path, first)
	t.Logf("kubelet renewed the token %v after its restart", time.Since(begun).Round(time.Millisecond))
	for range 2 {
		c.istiod.restart(t)
		c.istiod.await(c.istiodReady)
		p.connected("istiod")
	}
	p.noneLost()
}

// awaitFile waits until a file has another content than old.
func (p *pod) awaitFile(path, old string) {
	p.t.Helper()
	deadline := time.Now().Add(3 * wait.Limit) // kubelet looks at volumes about once in a minute
	for time.Now().Before(deadline) {
		if text, err := os.ReadFile(path); err == nil && string(text) != old {
			return
		}
		time.Sleep(50 * time.Millisecond) //nolint:forbidigo // up to a minute
	}
	p.t.Fatalf("%s has not changed", path)
}

func mebibytes(n int64) float64 { return float64(n) / (1 << 20) }
