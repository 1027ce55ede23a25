package vm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// states are the states of an agent whose package changes.
var states = []struct {
	name, reach string // and the shell commands that lead to it
	runs        bool   // an agent runs after an upgrade
}{
	{"stopped", "systemctl stop nametap.socket", false},
	{"stopped service", "systemctl stop nametap.service", false},
	{"hangs", "systemctl kill --kill-whom=main --signal=STOP nametap.service", true},
	{"killed", "systemctl kill --kill-whom=main --signal=KILL nametap.service", true},
	{"killed, program missing", "rm /usr/bin/nametap && systemctl kill --kill-whom=main --signal=KILL nametap.service", true},
	{"files missing", "rm -r /run/nametap /usr/libexec/nametap && systemctl kill --kill-whom=main --signal=KILL nametap.service", true},
	{"user missing", "userdel nametap 2>/dev/null || sed -i '/^nametap:/ d' /etc/passwd; systemctl kill --kill-whom=main --signal=KILL nametap.service", true},
}

// atState boots a machine with the package, and brings its agent to a state, under load.
func atState(t *testing.T, deb, reach string) (*vm.Machine, *traffic, string) {
	t.Helper()
	m := vm.Boot(t)
	path := put(t, m, deb)
	dpkg(m, "--install", path)
	enable(m, "")
	tr := startTraffic(t, m)
	m.Run("sh", "-euc", reach)
	return m, tr, path
}

// TestDebUpgradesInAnyState installs the package while its agent is stopped, hangs or cannot run. It runs
// afterwards unless it was stopped, and the machine has DNS all the time but for the 2 s of the lease. P3, V2.
func TestDebUpgradesInAnyState(t *testing.T) {
	deb := buildDeb(t, vm.Repository(), "0.1.0")
	for _, s := range states {
		t.Run(s.name, func(t *testing.T) {
			m, tr, path := atState(t, deb, s.reach)
			tr.forwardedGap()
			began := time.Now()
			dpkg(m, "--install", path)
			t.Logf("the installation took %v", time.Since(began).Round(time.Millisecond))
			if s.runs {
				m.AwaitMesh()
				wantActive(t, m, "after the upgrade")
			} else if state := strings.TrimSpace(m.Run("systemctl", "show", "--property=ActiveState", "--value", "nametap.service")); state != "inactive" {
				t.Errorf("nametap.service is %s", state)
			}
			wait.Until(t, "queries have answers", func() bool { return m.Lookup("other.example.org") == vm.NamedIP })
			tr.more(time.Second / 10)
			tr.wantOutage()
			tr.stop()
			m.Run("systemctl", append([]string{"start"}, vm.Units()...)...)
			m.AwaitMesh()
		})
	}
}

// TestDebPurgedInAnyState purges the package while its agent is stopped, hangs or cannot run. The machine has DNS, and
// no unit, process, user or rule that captures is left. P2, V2.
func TestDebPurgedInAnyState(t *testing.T) {
	deb := buildDeb(t, vm.Repository(), "0.1.0")
	for _, s := range states {
		t.Run(s.name, func(t *testing.T) {
			m, tr, _ := atState(t, deb, s.reach)
			tr.forwardedGap()
			began := time.Now()
			dpkg(m, "--purge", "nametap")
			t.Logf("the purge took %v", time.Since(began).Round(time.Millisecond))
			foreign := tr.count(load.Foreign)
			wait.Until(t, "the nameserver answers", func() bool { return tr.count(load.Foreign) > foreign+queriesPerSecond/2 })
			tr.wantOutage()
			tr.stop()
			if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" {
				t.Errorf("processes are left:\n%s", processes)
			}
			if units := m.Run("systemctl", "list-units", "--all", "--no-legend", "--plain", "*nametap*"); units != "" {
				t.Errorf("units are left:\n%s", units)
			}
			if users := m.Run("cat", "/etc/passwd", "/etc/group"); strings.Contains(users, "nametap") {
				t.Errorf("users are left:\n%s", users)
			}
			if m.Captured() && !strings.Contains(s.name, "program missing") { // without it, rules stay that capture nothing
				t.Errorf("rules are left:\n%s", m.Net.Rules())
			}
		})
	}
}
