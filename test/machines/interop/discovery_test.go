package interop

import (
	"net/http"
	"os/exec"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// The addresses of nametap-discovery in the cluster.
const (
	discoveryPort   = "16010"
	discoveryStatus = "127.0.0.1:16014"
)

// A discovery is a nametap-discovery that reads the cluster's API server.
type discovery struct {
	*cluster
	process *daemon
}

// discovery starts a nametap-discovery, and returns when it is ready.
func (c *cluster) discovery(flags ...string) *discovery {
	c.tb.Helper()
	d := &discovery{cluster: c}
	d.start(flags...)
	return d
}

// start starts the process, also after its end, and returns when it is ready.
func (d *discovery) start(flags ...string) {
	d.tb.Helper()
	d.process = d.run("discovery", exec.Command(discoveryBinary, append([]string{
		"--kubeconfig", d.path("kubeconfig"), "--grpc-addr", ":" + discoveryPort, "--http-addr", discoveryStatus, "--state-dir", "",
	}, flags...)...))
	d.process.await("nametap-discovery is ready", func() bool {
		response, err := d.client.Get("http://" + discoveryStatus + "/healthz/ready")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// discoveryFlags returns the flags of an agent whose control plane is nametap-discovery.
func (m *machine) discoveryFlags() []string {
	return []string{"--xds-plaintext", "--xds-addr", m.address(discoveryPort)}
}

// tableDifferences are the entries of a table of nametap-discovery (+) that differ from istiod's (-), for
// the objects of the tests. docs/discovery.md has the reasons.
const tableDifferences = `+ trailing.example.com {[198.51.100.9] External  }
+ web.outside.svc.cluster.local {[10.96.1.4] Kubernetes web outside}
- both.shop.svc.cluster.local {[10.96.1.5] Kubernetes both shop}
+ both.shop.svc.cluster.local {[10.96.1.5 fd00:96::105] Kubernetes both shop}
- trailing.example.com. {[198.51.100.9] External  }
- twice.example.com {[198.51.100.7] External  }
+ twice.example.com {[198.51.100.7 198.51.100.8] External  }
- web.back.svc.cluster.local {[198.51.100.10] External  }
+ web.back.svc.cluster.local {[10.96.1.2] Kubernetes web back}`

// D2: for the same cluster, the table of nametap-discovery is that of istiod, but for tableDifferences.
// D12: so is that of a workload with a Sidecar.
func TestDiscoveryTable(t *testing.T) {
	d := start(t, options{})
	d.discovery()
	for _, tc := range []struct {
		name, differences string
		pod               pod
		flags             []string
	}{
		{"all", tableDifferences, pod{"all", "shop"}, nil},
		{"a namespace with a Sidecar", "", pod{"scoped", "scoped"}, nil},
		{"a workload with a Sidecar", "", pod{"narrow", "scoped"}, []string{"--labels-file", "labels"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			near, far := d.machine(dual), d.machine(dual)
			for _, m := range []*machine{near, far} {
				m.write("labels", "app=\"narrow\"\n")
			}
			want := d.wantTable(far.agent(tc.pod, append(far.plain(d), tc.flags...)...))
			ours := near.agent(tc.pod, append(near.discoveryFlags(), tc.flags...)...)
			var diff string
			defer func() {
				if diff != tc.differences {
					t.Errorf("istiod (-) and nametap-discovery (+):\n%s\nwant:\n%s", diff, tc.differences)
				}
			}()
			wait.Until(t, "the tables differ as they should", func() bool {
				diff = want.diff(ours.table())
				return diff == tc.differences
			})
			t.Logf("%d hosts", len(want))
		})
	}
}
