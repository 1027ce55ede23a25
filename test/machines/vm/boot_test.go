package vm

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// early is a service that asks for a mesh name as soon as systemd has reached nss-lookup.target.
const early = `[Unit]
Wants=nss-lookup.target
After=nss-lookup.target
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=sh -c 'iptables-save >/var/tmp/early.rules; getent ahostsv4 ` + lab.Mesh + ` >/var/tmp/early.addresses'
[Install]
WantedBy=multi-user.target
`

// TestBoot boots a machine whose control plane is away. The first lookup of a service that starts after nss-lookup.target
// has the answer of the snapshot. Without nametap's program the host has DNS, restarts back off, and the agent starts by
// itself when the program is back. V2, V3.
func TestBoot(t *testing.T) {
	m := lab.Started(t)
	m.Write("/etc/systemd/system/early.service", early)
	m.Run("systemctl", "daemon-reload")
	m.Run("systemctl", "enable", "early.service")
	m.World.Control.Stop()
	m.Reboot()
	if got := m.Read("/var/tmp/early.addresses"); !strings.HasPrefix(got, lab.MeshIP+" ") {
		t.Errorf("the first lookup gives %q, want %s", got, lab.MeshIP)
	}
	if got := m.Read("/var/tmp/early.rules"); !strings.Contains(got, "-j NAMETAP_OUTPUT") {
		t.Errorf("the rules of nss-lookup.target:\n%s", got)
	}
	wantNames(t, m, map[string]string{lab.Mesh: lab.MeshIP})
	remove(m)
	m.Reboot()
	wantNames(t, m, map[string]string{lab.Mesh: lab.NamedIP})
	const pause = 10 * time.Second
	wait.Until(t, "10 s pass between two starts", func() bool {
		starts := timesOf(t, m.Journal("nametap.service"), "systemd[1]: Starting nametap.service")
		n := len(starts)
		if n > 20 {
			t.Fatalf("%d starts", n)
		}
		return n > 1 && starts[n-1].Sub(starts[n-2]) >= pause
	})
	restore(m)
	m.AwaitMesh()
}

// timesOf returns the times of the lines of a journal that contain a text.
func timesOf(t *testing.T, journal, text string) []time.Time {
	t.Helper()
	var times []time.Time
	for line := range strings.Lines(journal) {
		if !strings.Contains(line, text) {
			continue
		}
		at, err := time.Parse("Jan _2 15:04:05.000000", strings.Join(strings.Fields(line)[:3], " "))
		if err != nil {
			t.Fatalf("the journal has a line without a time: %v", err)
		}
		times = append(times, at)
	}
	return times
}

// squatter is a service that has the DNS port of the agent before this starts.
const squatter = `[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=notify
NotifyAccess=all
User=nobody
ExecStart=perl -MIO::Socket::IP -e 'my @s = map { my $h = $_; (IO::Socket::IP->new(LocalHost => $h, LocalPort => 15053, Proto => "udp") || die, IO::Socket::IP->new(LocalHost => $h, LocalPort => 15053, Proto => "tcp", Listen => 1) || die) } "127.0.0.1", "::1"; system "systemd-notify", "--ready"; sleep 6000'
[Install]
WantedBy=sysinit.target
`

// TestPortTakenAtBoot boots a machine where another program has the DNS port of the agent. The machine has DNS
// without the mesh, systemd shows the reason, and the agent captures when the port is free. At the next restart systemd
// holds the sockets. V10.
func TestPortTakenAtBoot(t *testing.T) {
	m := lab.Started(t)
	m.Write("/etc/systemd/system/squatter.service", squatter)
	m.Run("systemctl", "enable", "squatter.service")
	m.Reboot()
	m.Run("systemctl", "is-active", "squatter.service")
	wantNames(t, m, map[string]string{lab.Mesh: lab.NamedIP, "www.example.org": lab.NamedIP})
	awaitStatus(t, m, "15053: bind: address already in use")
	m.Run("systemctl", "disable", "--now", "squatter.service")
	m.AwaitMesh()
	m.Run("systemctl", "restart", "nametap.service")
	m.AwaitMesh()
	wantActive(t, m, "after a restart")
	m.Run("systemctl", "stop", "nametap.socket")
	wantNotCaptured(t, m)
}
