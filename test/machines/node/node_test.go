package node

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	if missing := missing(); len(missing) > 0 {
		fmt.Fprintf(os.Stderr, "the tests on a Kubernetes node cannot run here:\n\t%s\n", strings.Join(missing, "\n\t"))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// missing returns what the tests need and the machine lacks, and how to get it.
func missing() []string {
	var missing []string
	if os.Getuid() != 0 {
		missing = append(missing, "root: run `sudo make node`, with Go in root's PATH")
	}
	for _, tool := range []struct{ path, from string }{
		{"containerd", "containerd"}, {"runc", "runc"}, {"/usr/lib/cni/bridge", "containernetworking-plugins"}, {"iptables", "iptables"},
		{"conntrack", "conntrack"}, {"ip", "iproute2"}, {"nsenter", "util-linux"}, {"debootstrap", "debootstrap"},
	} {
		if _, err := exec.LookPath(tool.path); err != nil {
			missing = append(missing, fmt.Sprintf("the program %s: apt-get install --no-install-recommends %s", tool.path, tool.from))
		}
	}
	return missing
}

// TestNode runs all checks on one node, with the images of `make image`. P7.
func TestNode(t *testing.T) {
	c := newCluster(t)
	c.install(t)
	t.Run("newcomer", c.testNewcomer)
	t.Run("rollout", c.testRollout) // D50
	c.startIstiod()
	t.Run("manifest", c.testManifest)
	t.Run("delay", c.testDelay) // I0; alone, for its figures
	t.Run("pods", func(t *testing.T) {
		t.Run("first query with discovery", firstQuery{c, "discovery"}.test) // I0, K15
		t.Run("first query with istiod", firstQuery{c, "istiod"}.test)
		t.Run("job", c.testJob)                      // I6
		t.Run("cronjob", c.testCronJob)              // I6
		t.Run("agent killed", killing{c, true}.test) // K15
		t.Run("agent killed at its start", killing{c, false}.test)
		t.Run("supervisor killed", c.testSupervisorKilled)
		t.Run("agent hangs", c.testAgentHangs)              // K15
		t.Run("supervisor hangs", c.testSupervisorHangs)    // K15
		t.Run("control plane away", c.testControlPlaneAway) // I0
		t.Run("memory", c.testMemory)
		t.Run("host network", hostNetwork{c, true}.test) // K16
		t.Run("host network without HOST_IP", hostNetwork{c, false}.test)
		t.Run("pod security baseline", podSecurity{c, "baseline"}.test)
		t.Run("pod security restricted", podSecurity{c, "restricted"}.test)
		t.Run("without net admin", c.testWithoutNetAdmin) // K11
		t.Run("run as non-root", c.testRunAsNonRoot)      // I0
		t.Run("agent of another user", c.testOtherUser)   // I0
		t.Run("deletion", c.testDeletion)
	})
	t.Run("injected delay", c.testInjectedDelay) // I0; alone, for its figures
	c.startWebhook(t)
	t.Run("injected", func(t *testing.T) {
		t.Run("webhook first query", injection{c, "webhook", discoveryAddr, nil}.test) // I4
		for _, mode := range []string{"rules", "resolv"} {
			in := injection{c, mode, discoveryAddr, nil}
			t.Run(mode+" first query", in.test)     // I4, I11
			t.Run(mode+" job", in.testJob)          // I6
			t.Run(mode+" cronjob", in.testCronJob)  // I6
			t.Run(mode+" agent hangs", in.testHang) // I0, K15
		}
		t.Run("rules under restricted", c.testRulesRefused) // I11
		t.Run("egress", c.testEgress)                       // E1, E4, E6
	})
	t.Run("token", c.testToken)          // alone, because it restarts kubelet and istiod
	t.Run("config map", c.testConfigMap) // last, because nametap-discovery serves something else then
}
