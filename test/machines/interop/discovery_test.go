package interop

import (
	"net/http"
	"os/exec"
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
