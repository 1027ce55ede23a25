package node

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
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

// TestNode runs all checks on one node.
func TestNode(t *testing.T) {
	c := newCluster(t)
	// The manifest with nametap's own control plane, as it is.
	c.apply(t, manifest(t, "discovery"))
	t.Run("manifest", func(t *testing.T) {
		shop := &pod{space: &space{cluster: c, t: t, name: "default"}, name: "shop"}
		shop.ready()
		t.Logf("%s", shop.mustExec("nametap", "nametap", "query", "db.example.com"))
		t.Logf("%s", shop.mustExec("nametap", "nametap", "status"))
	})
}

var _ appsv1.Deployment
