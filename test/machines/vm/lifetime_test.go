package vm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// set replaces a setting of the agent; an empty value removes it.
func set(m *vm.Machine, name, value string) {
	m.Run("sed", "-i", "/^"+name+"=/ d", "/etc/default/nametap")
	if value != "" {
		m.Run("sed", "-i", "$ a "+name+"="+value, "/etc/default/nametap")
	}
}

// kill kills the process of a unit.
func kill(m *vm.Machine, units ...string) {
	for _, unit := range units {
		m.Run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", unit)
	}
}

// lapse is the longest time without DNS after the last answer of an agent: the lease of its rules, and the
// time of the next queries on a busy machine.
const lapse = 2*time.Second + 200*time.Millisecond

// TestKillWithoutNext kills the agent while its program is missing, under load. Its rules stay and capture
// nothing 2 s later. They are gone after a stop. V2, V4.
func TestKillWithoutNext(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	before := m.Net.Rules()
	m.Start()
	tr := startTraffic(t, m)
	m.Run("mv", binary, binary+".good")
	tr.forwardedGap()
	foreign := tr.count(load.Foreign)
	kill(m, "nametap.service")
	wait.Until(t, "the nameserver answers instead of the agent", func() bool { return tr.count(load.Foreign) > foreign })
	tr.more(time.Second / 10)
	tr.wantOutage()
	if !m.Captured() {
		t.Error("rules that capture nothing are removed, although the program is missing")
	}
	restore(m)
	m.Run("systemctl", append([]string{"stop"}, vm.Units()...)...)
	if after := m.Net.Rules(); after != before {
		t.Errorf("rules and sets after a stop:\n%s\nand before nametap was installed:\n%s", after, before)
	}
}

// TestAgentHangs stops the agent's process by SIGSTOP, under load, until systemd replaces it. V2.
func TestAgentHangs(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	tr.forwardedGap()
	foreign := tr.count(load.Foreign)
	m.Run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "nametap.service")
	wait.Until(t, "the nameserver answers instead of the agent", func() bool { return tr.count(load.Foreign) > foreign })
	tr.more(time.Second / 10)
	tr.wantOutage()
	began := time.Now()
	m.AwaitMesh()
	t.Logf("the next agent captures after %v", time.Since(began).Round(time.Millisecond))
}

// TestStopWhileBroken stops a service that cannot start, under load. It stays stopped, although
// queries wait in its socket. V4.
func TestStopWhileBroken(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	set(m, "NAMETAP_TTL", "nonsense")
	_, _ = m.Try("systemctl", "restart", "nametap.service")
	m.Run("systemctl", "stop", "nametap.service")
	foreign := tr.count(load.Foreign)
	wait.Until(t, "the nameserver answers", func() bool { return tr.count(load.Foreign) >= foreign+queriesPerSecond })
	if state := strings.TrimSpace(m.Run("systemctl", "show", "--property=ActiveState", "--value", "nametap.service")); state != "inactive" && state != "failed" {
		t.Errorf("nametap.service is %s after its stop", state)
	}
	m.Run("systemctl", append([]string{"stop"}, vm.Units()...)...)
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
}

// TestServiceStops stops nametap.service alone, under load. It stays stopped, and its rules are gone. V4.
func TestServiceStops(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	began := time.Now()
	m.Run("systemctl", "stop", "nametap.service")
	t.Logf("stopping took %v", time.Since(began).Round(time.Millisecond))
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
	foreign := tr.count(load.Foreign)
	wait.Until(t, "the nameserver answers", func() bool { return tr.count(load.Foreign) >= foreign+queriesPerSecond })
	if mesh, forwarded := tr.stop(load.Right, load.Foreign); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no answer", mesh, forwarded)
	}
	if state := strings.TrimSpace(m.Run("systemctl", "show", "--property=ActiveState", "--value", "nametap.service")); state != "inactive" {
		t.Errorf("nametap.service is %s after its stop", state)
	}
}

// TestChangedAtRestart restarts the agent with settings that change what is captured. The rules
// of the previous process are replaced or removed. V1.
func TestChangedAtRestart(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	set(m, "NAMETAP_CAPTURE_EXCLUDE_UID", "4242")
	m.Run("systemctl", "restart", "nametap.service")
	if rules := m.Net.Rules(); !strings.Contains(rules, "4242") {
		t.Errorf("the rules are not replaced:\n%s", rules)
	}
	set(m, "ISTIO_META_DNS_CAPTURE", "false")
	m.Run("systemctl", "restart", "nametap.service")
	wait.Until(t, "nothing is captured", func() bool { return !m.Captured() })
	if got := m.Lookup(vm.Mesh); got == vm.MeshIP {
		t.Errorf("with capture off, %s has %s", vm.Mesh, got)
	}
	set(m, "ISTIO_META_DNS_CAPTURE", "")
	m.Run("systemctl", "restart", "nametap.service")
	m.AwaitMesh()
}

// TestFailClosed checks that rules that are to stay do: when the agent does not come back, and
// after a stop. A start takes them over. V2.
func TestFailClosed(t *testing.T) {
	m := vm.Boot(t)
	m.Install("NAMETAP_CAPTURE_FAIL_OPEN=false")
	m.Start()
	m.Run("mv", binary, binary+".good")
	kill(m, "nametap.service")
	wait.Until(t, "systemd has tried to start another agent", func() bool {
		return strings.Contains(m.Journal("nametap.service"), "waiting for 1 s")
	})
	if !m.Captured() {
		t.Error("the rules are removed")
	}
	restore(m)
	m.Run("systemctl", "restart", "nametap.service")
	m.Run("systemctl", "stop", "nametap.service")
	if !m.Captured() {
		t.Error("the rules are removed by the stop")
	}
	m.Run("systemctl", "start", "nametap.service")
	m.AwaitMesh()
}

// TestOtherPort moves the agent to another port. The rules of the previous port are replaced.
// V1.
func TestOtherPort(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Write("/etc/systemd/system/nametap.socket.d/port.conf", `[Socket]
ListenDatagram=
ListenStream=
ListenDatagram=127.0.0.1:15153
ListenStream=127.0.0.1:15153
ListenDatagram=[::1]:15153
ListenStream=[::1]:15153
`)
	set(m, "DNS_PROXY_ADDR", "localhost:15153")
	m.Run("systemctl", "daemon-reload")
	m.Run("systemctl", "restart", "nametap.socket")
	m.Run("systemctl", "start", "nametap.service")
	m.AwaitMesh()
	if rules := m.Net.Rules(); strings.Contains(rules, "15053") {
		t.Errorf("rules of the previous port are left:\n%s", rules)
	}
}

// TestOtherPortOfAgentOnly gives the agent another port than its sockets. It cannot start, so the
// rules are removed, and systemd shows why. V2.
func TestOtherPortOfAgentOnly(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	set(m, "DNS_PROXY_ADDR", "localhost:15153")
	_, _ = m.Try("systemctl", "restart", "nametap.service")
	wait.Until(t, "the rules are removed", func() bool { return !m.Captured() })
	wait.Until(t, "systemctl status shows the reason", func() bool {
		status, _ := m.Try("systemctl", "status", "nametap.service")
		return strings.Contains(status, "want the port of localhost:15153")
	})
}

// TestSocketsOfOtherUsers binds a UDP socket to the address of the agent's, as another user, which
// would receive the queries of the whole host. The kernel refuses it, also while the agent
// restarts. V1.
func TestSocketsOfOtherUsers(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	const bind = `socket(my $s, PF_INET, SOCK_DGRAM, 0) or die "socket: $!";
setsockopt($s, SOL_SOCKET, SO_REUSEADDR, 1) or die "setsockopt: $!";
bind($s, pack_sockaddr_in(15053, inet_aton("127.0.0.1"))) or die "bind: $!";
my $in = ""; vec($in, fileno($s), 1) = 1;
select($in, undef, undef, 3) and recv($s, my $query, 512, 0), print "received a query\n";`
	steal := func() {
		t.Helper()
		output, err := m.Try("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "perl", "-MSocket", "-e", bind)
		if err == nil || !strings.Contains(output, "bind: Address already in use") {
			t.Errorf("another user binds to the address of the agent: %v: %s", err, output)
		}
	}
	startTraffic(t, m)
	steal()
	m.Run("systemctl", "restart", "nametap.service")
	steal()
	m.Run("mv", binary, binary+".good")
	kill(m, "nametap.service")
	steal()
}

// TestSquatterOnVM binds to the address of the agent before systemd does, as another user, with a
// socket that then receives the queries. The agent does not start, and captures nothing. V1.
func TestSquatterOnVM(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Run("systemctl", "stop", "nametap.socket", "nametap.service")
	const bind = `socket(my $s, PF_INET, SOCK_DGRAM, 0) or die; setsockopt($s, SOL_SOCKET, SO_REUSEADDR, 1) or die;
setsockopt($s, SOL_SOCKET, 25, "lo") or die; bind($s, pack_sockaddr_in(15053, inet_aton("127.0.0.1"))) or die "bind: $!"; sleep 600`
	m.Run("systemd-run", "--unit=squatter", "--uid=nobody", "--property=Type=exec", "perl", "-MSocket", "-e", bind)
	wait.Until(t, "the address is taken", func() bool { return strings.Contains(m.Read("/proc/net/udp"), "0100007F:3ACD") })
	_, _ = m.Try("systemctl", "start", "--no-block", "nametap.service")
	wait.Until(t, "the agent says so", func() bool {
		return strings.Contains(m.Journal("nametap.service"), "has a UDP socket at the address of nametap.socket")
	})
	if m.Captured() {
		t.Error("DNS is captured")
	}
	m.Run("systemctl", "stop", "squatter.service")
	m.AwaitMesh()
}

// TestQuitOnVM asks the agent to end and to drain, as another user. The agent refuses. R9.
func TestQuitOnVM(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	pid := func() string { return m.Run("systemctl", "show", "--property=MainPID", "nametap.service") }
	before := pid()
	for _, path := range []string{"/drain", "/quitquitquit"} {
		reply := m.Run("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "bash", "-euc",
			`exec 3<>/dev/tcp/127.0.0.1/15020; printf 'POST %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$0" >&3; cat <&3`, path)
		if !strings.HasPrefix(reply, "HTTP/1.0 403") {
			t.Errorf("%s: %s", path, reply)
		}
	}
	if after := pid(); after != before || !m.Captured() {
		t.Errorf("the agent was %s, now %s; captured: %v", before, after, m.Captured())
	}
}
