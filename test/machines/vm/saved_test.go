package vm_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/vm"
)

// beforeService looks up a name after the firewall has started and before nametap does.
const beforeService = `[Unit]
Description=A service between the firewall and nametap
Wants=network.target
After=network.target nftables.service netfilter-persistent.service firewalld.service ufw.service
Before=nametap.service
[Service]
Type=oneshot
ExecStart=sh -c 'iptables-save >/var/tmp/before.rules; getent ahostsv4 www.example.org >/var/tmp/before.addresses'
[Install]
WantedBy=multi-user.target
`

// TestSavedRules saves the rules of a firewall while the agent runs, in the way of each firewall, and boots. The
// firewall restores all of its rules. DNS works before nametap starts, with it, and if it is not started. Nothing
// of nametap's is left after a stop. V8.
func TestSavedRules(t *testing.T) {
	for _, f := range []struct {
		name, unit string // of the firewall
		packages   []string
		files      map[string]string
		on, save   string // shell commands
		restored   bool   // the firewall has saved rules of nametap
		has        string // in the rules while the firewall is on
	}{
		{
			name: "netfilter-persistent", unit: "netfilter-persistent.service", packages: []string{"iptables-persistent"}, has: "SITE",
			files: map[string]string{"/etc/iptables/rules.v4": persistent("10.9.0.0/24"), "/etc/iptables/rules.v6": persistent("fd09::/64")},
			on:    "netfilter-persistent reload && systemctl enable netfilter-persistent", save: "netfilter-persistent save", restored: true,
		},
		{
			name: "ufw", unit: "ufw.service", packages: []string{"ufw"}, has: "ufw-user-input",
			on: "ufw allow 22/tcp && ufw --force enable && systemctl enable --now ufw", save: "ufw reload",
		},
		{
			name: "firewalld", unit: "firewalld.service", packages: []string{"firewalld"}, has: "filter_INPUT",
			on: "systemctl enable --now firewalld && firewall-cmd --state", save: "firewall-cmd --runtime-to-permanent && firewall-cmd --reload",
		},
	} {
		t.Run(f.name, func(t *testing.T) {
			m := vm.Boot(t, vm.Packages(f.packages...))
			for path, text := range f.files {
				m.Write(path, text)
			}
			m.Run("sh", "-euc", f.on)
			alone := all(m)
			if !strings.Contains(alone, f.has) {
				t.Fatalf("the firewall is off:\n%s", alone)
			}
			m.Install()
			m.Start()
			m.Run("sh", "-euc", f.save)
			m.AwaitMesh()
			m.Write("/etc/systemd/system/before.service", beforeService)
			m.Run("systemctl", "daemon-reload")
			m.Run("systemctl", "enable", "before.service")

			m.Reboot()
			m.Run("systemctl", "is-active", f.unit)
			if got := m.Read("/var/tmp/before.addresses"); !strings.HasPrefix(got, vm.NamedIP+" ") {
				t.Errorf("before nametap starts, a name has %q", got)
			}
			if got := m.Read("/var/tmp/before.rules"); strings.Contains(got, "-j NAMETAP_OUTPUT") != f.restored {
				t.Errorf("before nametap starts, the rules are:\n%s", got)
			}
			m.AwaitMesh()
			if got := m.Lookup("other.example.org"); got != vm.NamedIP {
				t.Errorf("other.example.org has %s, want %s", got, vm.NamedIP)
			}
			wantRules(t, "after the boot", others(all(m)), others(alone))
			m.Run("systemctl", append([]string{"stop"}, vm.Units()...)...)
			wantEnd(t, all(m), alone)

			m.Run("systemctl", append([]string{"disable"}, vm.Units()...)...)
			m.Reboot()
			m.Run("systemctl", "is-active", f.unit)
			for _, name := range []string{vm.Mesh, "third.example.org"} {
				wait.Until(t, name+" has the address of the nameserver without nametap", func() bool { return m.Lookup(name) == vm.NamedIP })
			}
		})
	}
}
