package node

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// hostNetwork is the check that a pod on its node's network captures nothing (I0, K16).
type hostNetwork struct {
	*cluster
	hostIP bool // the pod has HOST_IP, as in the manifest
}

func (c hostNetwork) test(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	spec.Spec.HostNetwork = true
	// Two pods with the same ports do not fit on one node.
	spec.Spec.InitContainers[0].Ports, spec.Spec.InitContainers[0].ReadinessProbe, spec.Spec.InitContainers[0].LivenessProbe = nil, nil, nil
	if !c.hostIP {
		for i := range spec.Spec.InitContainers {
			spec.Spec.InitContainers[i].Env = slices.DeleteFunc(spec.Spec.InitContainers[i].Env, func(v corev1.EnvVar) bool { return v.Name == "HOST_IP" })
		}
	}
	p := s.create(spec)
	log := p.captureFailed()
	rules := c.output(t, "iptables-save") + c.output(t, "ip6tables-save")
	if strings.Contains(rules, "NAMETAP_") {
		t.Errorf("the node has rules of nametap:\n%s", rules)
	}
	line, _, _ := strings.Cut(log, "\n")
	t.Logf("the first line of the log: %s", line)
	if !strings.Contains(line, "hostNetwork") {
		t.Errorf("the first line of the log does not speak of hostNetwork:\n%s", log)
	}
}

// podSecurity is the check of a Pod Security level.
type podSecurity struct {
	*cluster
	level string
}

// test checks the reply of an API server that enforces a Pod Security level.
func (c podSecurity) test(t *testing.T) {
	t.Parallel()
	s := c.space(t, map[string]string{"pod-security.kubernetes.io/enforce": c.level})
	spec := podOf(t, "istiod")
	err := c.api.create(s.path("pods")+"?dryRun=All", spec)
	if err == nil {
		t.Fatal("the pod was accepted")
	}
	t.Logf("%v", err)
	for _, want := range []string{`"nametap-capture"`, `"NET_ADMIN"`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the message does not name %s", want)
		}
	}
	// The agent itself and its volumes are fit for every c.level.
	if strings.Contains(err.Error(), `"nametap"`) {
		t.Error("the message names the agent")
	}
}

// testWithoutNetAdmin checks that the first line of the log says what is missing.
func (c *cluster) testWithoutNetAdmin(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	spec.Spec.InitContainers[1].SecurityContext.Capabilities.Add = nil
	p := s.create(spec)
	log := p.captureFailed()
	line, _, _ := strings.Cut(log, "\n")
	t.Logf("the first line of the log: %s", line)
	if !strings.Contains(line, "CAP_NET_ADMIN") {
		t.Errorf("the first line of the log does not name CAP_NET_ADMIN:\n%s", log)
	}
}

// testRunAsNonRoot checks that a pod starts whose own security context forbids root.
func (c *cluster) testRunAsNonRoot(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	yes, user := true, int64(1000)
	spec.Spec.SecurityContext.RunAsNonRoot, spec.Spec.SecurityContext.RunAsUser = &yes, &user
	p := s.create(spec)
	p.ready()
	if answer := p.mustExec("app", "getent", "ahostsv4", "db.example.com"); !strings.Contains(answer, "192.0.2.53") {
		t.Errorf("getent: %s", answer)
	}
}

// testOtherUser checks that no rules redirect the queries of an agent with another user than the
// manifest's, as on OpenShift, and that the log gives the reason.
func (c *cluster) testOtherUser(t *testing.T) {
	t.Parallel()
	s := c.space(t, nil)
	spec := podOf(t, "discovery")
	user, group := int64(100650000), int64(0)
	spec.Spec.InitContainers[0].SecurityContext.RunAsUser, spec.Spec.InitContainers[0].SecurityContext.RunAsGroup = &user, &group
	p := s.create(spec)
	log := p.captureFailed()
	t.Logf("the log: %s", log)
	if !strings.Contains(log, "no rules are installed, because the rules would redirect the agent's own queries to itself") ||
		!strings.Contains(log, "uid 100650000") {
		t.Errorf("the log does not name the user:\n%s", log)
	}
}

// captureFailed waits until the container of the rules has failed, and returns its log.
func (p *pod) captureFailed() string {
	p.t.Helper()
	const name = "nametap-capture"
	p.await(name+" has ended", func(now *corev1.Pod) bool {
		capture := status(now, name)
		return capture.State.Terminated != nil || capture.LastTerminationState.Terminated != nil
	})
	var log string
	wait.Until(p.t, "kubelet returns the log of "+name, func() bool {
		now, err := p.get()
		if err != nil {
			return false
		}
		// kubelet removes containers before the previous one, and may then say so.
		log, err = p.log(name, status(now, name).State.Terminated == nil)
		return err == nil && log != "" && !strings.HasPrefix(log, "unable to retrieve")
	})
	return log
}
