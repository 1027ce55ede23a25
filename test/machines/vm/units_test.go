package vm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// allUnits are the units of a running agent.
func allUnits() []string {
	return append(vm.Units(), "nametap-rules.service", "nametap-resolved.socket")
}

// wantActive fails the test unless all units are active.
func wantActive(t *testing.T, m *vm.Machine, when string) {
	t.Helper()
	if states, err := m.Try("systemctl", append([]string{"is-active"}, allUnits()...)...); err != nil {
		t.Errorf("%s, the states of %v are:\n%s", when, allUnits(), states)
	}
}

// TestManyRestarts restarts the units more often than systemd does by default. All run afterwards. V1, V5.
func TestManyRestarts(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	const often = 8
	for range often {
		m.Run("systemctl", append([]string{"restart"}, vm.Units()...)...)
		m.AwaitMesh() // a query starts what is missing
	}
	wantActive(t, m, "after restarts of the sockets")
	for range often {
		m.Run("systemctl", "restart", "nametap.service")
	}
	wantActive(t, m, "after restarts of the service")
	m.AwaitMesh()
}

// TestUnitsUnderChanges does to systemd and the units what administrators do, under load. No query is lost, none
// passes the agent, and the next agent runs as before. V1.
func TestUnitsUnderChanges(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	for _, step := range []string{
		"systemctl daemon-reload", "systemctl daemon-reexec", "systemctl daemon-reload && systemctl restart nametap.service",
		"systemctl daemon-reexec && systemctl restart nametap.service", "systemctl restart systemd-journald.service",
		"rm -r /run/nametap && systemctl restart nametap.service", "systemctl reset-failed", "systemctl isolate multi-user.target",
		"systemctl stop nametap-resolved.socket && systemctl restart nametap.service",
	} {
		m.Run("sh", "-euc", step)
		tr.more(time.Second)
		if bad := tr.count(load.Foreign, load.Lost, load.Unreachable, load.Failed, load.Wrong); bad > 0 {
			t.Fatalf("%s: %d queries have no right answer", step, bad)
		}
		wantActive(t, m, "after "+step)
	}
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
}

// TestRescue changes to rescue.target, under load, and back: DNS is the nameservers' meanwhile, without a gap. V4.
func TestRescue(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	tr.forwardedGap()
	m.Run("systemctl", "isolate", "rescue.target")
	foreign := tr.count(load.Foreign)
	wait.Until(t, "the nameserver answers", func() bool { return tr.count(load.Foreign) >= foreign+queriesPerSecond })
	tr.wantOutage()
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
	m.Run("systemctl", "isolate", "multi-user.target")
	m.AwaitMesh()
	wantActive(t, m, "after the change back")
	if mesh, forwarded := tr.stop(load.Right, load.Foreign); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no answer", mesh, forwarded)
	}
}

// TestUserMissing restarts the agent after its user was deleted. DNS is back within 2 s, and the agent starts by
// itself when the user is back. V2.
func TestUserMissing(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	m.Run("sh", "-euc", "cp /etc/passwd /etc/group /root && sed -i '/^nametap:/ d' /etc/passwd /etc/group")
	tr.forwardedGap()
	foreign := tr.count(load.Foreign)
	kill(m, "nametap.service")
	wait.Until(t, "the nameserver answers instead of the agent", func() bool { return tr.count(load.Foreign) > foreign })
	tr.more(time.Second / 10)
	tr.wantOutage()
	wait.Until(t, "systemctl status shows the reason", func() bool {
		status, _ := m.Try("systemctl", "status", "nametap.service")
		return strings.Contains(status, "217/USER")
	})
	m.Run("cp", "/root/passwd", "/root/group", "/etc")
	m.AwaitMesh()
}

// TestTmpFull restarts the agent, by a command and by its death, while /tmp and /var/tmp have no room, under load. It
// starts, and a stop leaves no rules. V10.
func TestTmpFull(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		m.Run("mount", "-t", "tmpfs", "-o", "nr_inodes=1", "full", dir)
		if _, err := m.Try("mkdir", dir+"/more"); err == nil {
			t.Fatalf("%s has room", dir)
		}
	}
	tr := startTraffic(t, m)
	m.Run("systemctl", "restart", "nametap.service")
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	kill(m, "nametap.service")
	m.AwaitMesh()
	m.Run("mv", binary, binary+".good")
	kill(m, "nametap.service")
	restore(m)
	m.Run("systemctl", "stop", "nametap.socket")
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
}

// TestPortTakenAtBoot boots a machine where another program has the DNS port of the agent. The machine has DNS
// without the mesh, systemd shows the reason, and the agent captures when the port is free. At the next restart systemd
// holds the sockets. V10.
func TestPortTakenAtBoot(t *testing.T) {
	m := vm.Boot(t)
	m.Write("/etc/systemd/system/squatter.service", `[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=notify
NotifyAccess=all
User=nobody
ExecStart=perl -MIO::Socket::IP -e 'my @s = map { my $h = $_; (IO::Socket::IP->new(LocalHost => $h, LocalPort => 15053, Proto => "udp") || die, IO::Socket::IP->new(LocalHost => $h, LocalPort => 15053, Proto => "tcp", Listen => 1) || die) } "127.0.0.1", "::1"; system "systemd-notify", "--ready"; sleep 6000'
[Install]
WantedBy=sysinit.target
`)
	m.Install()
	m.Start()
	m.Run("systemctl", "enable", "squatter.service")
	m.Reboot()
	m.Run("systemctl", "is-active", "squatter.service")
	for _, name := range []string{vm.Mesh, "www.example.org"} {
		if got := m.Lookup(name); got != vm.NamedIP {
			t.Errorf("%s has %s, want %s from the nameserver", name, got, vm.NamedIP)
		}
	}
	wait.Until(t, "systemctl status shows the reason", func() bool {
		status, _ := m.Try("systemctl", "status", "--lines=20", "nametap.service")
		return strings.Contains(status, "15053: bind: address already in use")
	})
	m.Run("systemctl", "disable", "--now", "squatter.service")
	m.AwaitMesh()
	m.Run("systemctl", "restart", "nametap.service")
	m.AwaitMesh()
	wantActive(t, m, "after a restart")
	m.Run("systemctl", "stop", "nametap.socket")
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
}
