package vm_test

import (
	"testing"
	"time"

	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// TestRPM installs, upgrades and removes the rpm, as TestDeb and TestDebUpgradesUnderLoad do with the deb. The
// removal leaves only the settings, the state and the user. P2, P3, P4.
func TestRPM(t *testing.T) {
	m := vm.Boot(t, vm.Packages("rpm"))
	path := put(t, m, build(t, vm.Repository(), "nametap-[0-9]*.rpm", "FORMATS=rpm"))
	before := stateOf(m)
	rpm := func(args ...string) { m.Run("rpm", append([]string{"--nodeps", "--force-debian"}, args...)...) }
	rpm("--install", path)
	for _, unit := range vm.Units() {
		if state, _ := m.Try("systemctl", "is-enabled", unit); state != "disabled\n" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	if got := m.Net.Rules(); got != before.rules {
		t.Errorf("rules:\n%s", got)
	}
	enable(m, "NAMETAP_CAPTURE_FAIL_OPEN=false\n")
	tr := startTraffic(t, m)
	process := running(m)
	rpm("--upgrade", "--force", path)
	if running(m) == process {
		t.Error("the upgrade has not replaced the agent")
	}
	tr.more(time.Second)
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	if got := m.Read("/etc/default/nametap"); got != settings+"NAMETAP_CAPTURE_FAIL_OPEN=false\n" {
		t.Errorf("/etc/default/nametap has %q", got)
	}
	rpm("--erase", "nametap")
	// The directories of the shells belong to a package of an rpm distribution.
	m.Run("sh", "-euc", `rm -r /var/lib/nametap /etc/default/nametap.rpmsave /root/.rpmdb
userdel nametap
find /usr/share/fish /usr/share/zsh -type d -empty -delete`)
	after := stateOf(m)
	after.compare(t, before)
}
