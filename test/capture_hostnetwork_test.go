package test

import (
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestCaptureHostNetwork checks that a pod with the network of its node captures nothing
// unless a setting allows it.
func TestCaptureHostNetwork(t *testing.T) { // K16
	t.Parallel()
	v := newVM(t, "nft")
	refused := func(what string, r result) {
		t.Helper()
		if r.code == 0 || !strings.Contains(r.stderr, "network of its node") || !strings.Contains(r.stderr, "--capture-host-network") || v.captured() {
			t.Errorf("%s: %+v", what, r)
		}
	}
	own := slices.Clone(v.environment)
	for what, address := range map[string]string{"two addresses that are one": "10.1.2.3", "the node's address is here": self6} {
		v.environment = append(slices.Clone(own), "HOST_IP="+address)
		refused(what, v.root(v.args("apply")...))
		a := v.launch("--capture")
		wait.For(t, "the agent ends", a.ended)
		if a.ProcessState.Success() || a.log.Count("network of its node") != 1 || v.captured() {
			t.Errorf("%s: agent: %v\n%s", what, a.ProcessState, a.log)
		}
		if r := v.root(v.args("apply", "--capture-host-network")...); r.code != 0 || !v.captured() {
			t.Errorf("%s: told to: %+v", what, r)
		}
		v.root(v.args("remove")...)
	}
	v.environment = own

	// Only kubelet's file, as with manifests that do not pass the address.
	hosts := v.write("hosts", "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n")
	mounted := func(file string, args ...string) result {
		cmd := v.command(args...)
		cmd.SysProcAttr = nil
		cmd.Args = append([]string{"unshare", "--mount", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, file}, cmd.Args...)
		cmd.Path = "/usr/bin/unshare"
		return v.run(cmd)
	}
	refused("kubelet's file", mounted(hosts, v.args("apply")...))
	pods := v.write("hosts-of-pod", "# Kubernetes-managed hosts file.\n127.0.0.1 localhost\n")
	v.environment = append(slices.Clone(own), "HOST_IP=10.99.0.1")
	if r := mounted(pods, v.args("apply")...); r.code != 0 || !v.captured() {
		t.Errorf("a pod with its own network: %+v", r)
	}
	v.root(v.args("remove")...)
	v.environment = own
}
