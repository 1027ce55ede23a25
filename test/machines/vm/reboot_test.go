package vm_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/test/machines/vm"
)

// earlyService asks for a mesh name as soon as systemd has reached nss-lookup.target.
const earlyService = `[Unit]
Description=A service that needs DNS
Wants=nss-lookup.target
After=nss-lookup.target
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=sh -c 'iptables-save >/var/tmp/early.rules; getent ahostsv4 ` + vm.Mesh + ` >/var/tmp/early.addresses'
StandardOutput=journal
[Install]
WantedBy=multi-user.target
`

// TestBoot boots a machine whose control plane is away. The first lookup of a service that
// starts after nss-lookup.target has the answer of the snapshot. V3.
func TestBoot(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Write("/etc/systemd/system/early.service", earlyService)
	m.Run("systemctl", "daemon-reload")
	m.Run("systemctl", "enable", "early.service")
	m.World.Control.Stop()
	m.Reboot()
	if got := m.Read("/var/tmp/early.addresses"); !strings.HasPrefix(got, vm.MeshIP+" ") {
		t.Errorf("the first lookup gives %q, want %s", got, vm.MeshIP)
	}
	if got := m.Read("/var/tmp/early.rules"); !strings.Contains(got, "-j NAMETAP_OUTPUT") {
		t.Errorf("the rules of nss-lookup.target:\n%s", got)
	}
	t.Logf("%s", m.Run("systemd-analyze", "critical-chain", "early.service"))
	if got := m.Lookup(vm.Mesh); got != vm.MeshIP {
		t.Errorf("%s has %s, want %s", vm.Mesh, got, vm.MeshIP)
	}
}
