package vm

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// fresh brings the agent of a machine back to its first settings, and starts it. It returns the rules without it.
func fresh(m *lab.Machine) (without string) {
	m.Run("sh", "-c", "test ! -e "+binary+".good || mv "+binary+".good "+binary)
	m.Configure()
	m.Systemctl("stop")
	m.Run("systemctl", "reset-failed")
	without = m.Net.Rules()
	m.Systemctl("start")
	m.AwaitMesh()
	return without
}

// TestService installs nametap as README.md says, and then does to its units and its process what administrators and
// programs do. Each subtest begins with a running agent. V1, V2, V4, V9, V10, R9.
func TestService(t *testing.T) {
	m := lab.Boot(t)
	wantNames(t, m, map[string]string{lab.Mesh: lab.NamedIP})
	m.Install()
	m.Start()
	for _, sub := range []struct {
		name string
		test func(t *testing.T, m *lab.Machine)
	}{
		{"names", testNames},
		{"restarts", testRestarts}, // V1
		{"deaths", testDeaths},     // V1
		{"administration", testAdministration},
		{"other users", testOtherUsers},
		{"stops", testStops},
		{"stops in restarts", testStopsInRestarts}, // V4
		{"hang", testHang},
		{"cannot start", testCannotStart},
		{"conntrack is full", testFullConntrack},
	} {
		m.Sub(t, sub.name, func(t *testing.T) { sub.test(t, m) })
		fresh(m)
	}
}

// testNames looks up names in several ways, and reads what the installation leaves in the log.
func testNames(t *testing.T, m *lab.Machine) {
	wantNames(t, m, map[string]string{lab.Mesh: lab.MeshIP, "web": lab.MeshIP, "web.corp.example": lab.MeshIP, "www.example.org": lab.NamedIP})
	if got := m.Run("getent", "ahostsv4", "web"); !strings.Contains(got, lab.MeshIP) {
		t.Errorf("getent prints %q, want %s", got, lab.MeshIP)
	}
	if got := m.Run("nametap", "status"); !strings.Contains(got, "ready          yes") {
		t.Errorf("nametap status prints:\n%s", got)
	}
	if journal := m.Journal("nametap.service"); !strings.Contains(journal, "Started nametap.service") || strings.Contains(journal, "level=ERROR") {
		t.Errorf("the journal:\n%s", journal)
	}
	if got := m.Run("systemctl", "is-enabled", "nametap.socket", "nametap.service"); got != "enabled\nenabled\n" {
		t.Errorf("the units are %q", got)
	}
}

// testRestarts restarts the agent under load.
func testRestarts(t *testing.T, m *lab.Machine) {
	tr := startTraffic(t, m)
	replace(tr, *rounds, func(int) { m.Run("systemctl", "restart", "nametap") })
	tr.none(load.Right)
}

// testDeaths kills the agent under load. Only queries that the process has read may be lost: almost none for the mesh
// name, which it answers at once, and some whose answers it awaits from a nameserver.
func testDeaths(t *testing.T, m *lab.Machine) {
	tr := startTraffic(t, m)
	replace(tr, *rounds, func(int) {
		dies(t, m)
		wait.Until(t, "the next restart is without a pause", func() bool {
			_, err := m.Try("test", "-e", "/run/nametap/starts")
			return err != nil
		})
	})
	if n := tr.count(load.Foreign, load.Wrong, load.Failed); n > 0 {
		t.Errorf("%d queries have a wrong answer", n)
	}
	mesh, forwarded := tr.stop(load.Right)
	if mostMesh, mostForwarded := 2+*rounds/5, 20**rounds; mesh > mostMesh || forwarded > mostForwarded {
		t.Errorf("%d queries for the mesh name and %d for others are lost, want at most %d and %d", mesh, forwarded, mostMesh, mostForwarded)
	}
}

// testAdministration does to systemd and the units what administrators do, under load. No query is lost, none passes the
// agent, and the next agent runs as before.
func testAdministration(t *testing.T, m *lab.Machine) {
	tr := startTraffic(t, m)
	for _, step := range []string{
		"systemctl daemon-reload", "systemctl daemon-reexec", "systemctl daemon-reload && systemctl restart nametap.service",
		"systemctl daemon-reexec && systemctl restart nametap.service", "systemctl restart systemd-journald.service",
		"rm -r /run/nametap && systemctl restart nametap.service", "systemctl reset-failed", "systemctl isolate multi-user.target",
		"systemctl stop nametap-resolved.socket && systemctl restart nametap.service",
		// More often than systemd does by default.
		"for i in 1 2 3 4 5 6 7 8; do systemctl restart nametap.service; done",
	} {
		m.Run("sh", "-euc", step)
		tr.more(time.Second)
		if bad := tr.count(load.Foreign, load.Lost, load.Unreachable, load.Failed, load.Wrong); bad > 0 {
			t.Fatalf("%s: %d queries have no right answer", step, bad)
		}
		wantActive(t, m, "after "+step)
	}
	tr.none(load.Right)
}

// asNobody runs a program as another user, who has no rights.
func asNobody(command ...string) []string {
	return append([]string{"setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"}, command...)
}

// testOtherUsers has another user bind to the address of the agent, which would receive the queries of the whole host, and
// ask the agent to end. Both are refused. If the other socket is first, the agent does not start, and captures nothing.
func testOtherUsers(t *testing.T, m *lab.Machine) {
	const open = `socket(my $s, PF_INET, SOCK_DGRAM, 0) or die; setsockopt($s, SOL_SOCKET, SO_REUSEADDR, 1) or die;
setsockopt($s, SOL_SOCKET, 25, "lo"); bind($s, pack_sockaddr_in(15053, inet_aton("127.0.0.1"))) or die "bind: $!"; sleep 600`
	steal := func() {
		t.Helper()
		command := asNobody("perl", "-MSocket", "-e", open)
		if output, err := m.Try(command[0], command[1:]...); err == nil || !strings.Contains(output, "bind: Address already in use") {
			t.Errorf("another user binds to the address of the agent: %v: %s", err, output)
		}
	}
	process := running(m)
	for _, path := range []string{"/drain", "/quitquitquit"} {
		command := asNobody("bash", "-euc", `exec 3<>/dev/tcp/127.0.0.1/15020; printf 'POST %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$0" >&3; cat <&3`, path)
		if reply := m.Run(command[0], command[1:]...); !strings.HasPrefix(reply, "HTTP/1.0 403") {
			t.Errorf("%s: %s", path, reply)
		}
	}
	if after := running(m); after != process || !m.Captured() {
		t.Errorf("the agent was %s, now %s; captured: %v", process, after, m.Captured())
	}
	steal()
	remove(m)
	kill(m)
	steal()
	restore(m)
	m.Systemctl("stop")
	m.Run("systemd-run", "--unit=squatter", "--uid=nobody", "--property=Type=exec", "perl", "-MSocket", "-e", open)
	wait.Until(t, "the address is taken", func() bool { return strings.Contains(m.Read("/proc/net/udp"), "0100007F:3ACD") })
	_, _ = m.Try("systemctl", "start", "--no-block", "nametap.service")
	wait.Until(t, "the agent says so", func() bool {
		return strings.Contains(m.Journal("nametap.service"), "has a UDP socket at the address of nametap.socket")
	})
	wantNotCaptured(t, m)
	m.Run("systemctl", "stop", "squatter.service")
	m.AwaitMesh()
}

// testStops stops units under load, in several ways. Nothing is left, each query has an answer, and the agent stays
// stopped although queries come. V4.
func testStops(t *testing.T, m *lab.Machine) {
	for _, way := range []struct {
		name, stop string
		lost       bool // queries that wait in the sockets are lost with these
	}{
		{"both", "systemctl stop nametap.socket nametap.service", false},
		{"the service", "systemctl stop nametap.service", false},
		{"the socket", "systemctl stop nametap.socket", true},
		{"a service that cannot start", "sed -i '$ a NAMETAP_TTL=nonsense' /etc/default/nametap; systemctl restart nametap.service; systemctl stop nametap.service", true},
		{"rescue.target", "systemctl isolate rescue.target", false},
	} {
		m.Sub(t, way.name, func(t *testing.T) {
			before := fresh(m)
			tr := startTraffic(t, m)
			var took time.Duration
			tr.outage(func() {
				began := time.Now()
				_, _ = m.Try("sh", "-c", way.stop)
				took = time.Since(began)
				t.Logf("it took %v", took.Round(time.Millisecond))
			})
			tr.past(time.Second)
			wait.Until(t, "nametap.service is inactive", func() bool {
				state := m.Property("ActiveState", "nametap.service")
				return state == "inactive" || state == "failed"
			})
			if way.lost {
				tr.end()
			} else {
				tr.none(load.Right, load.Foreign)
			}
			if way.name == "both" {
				const limit = 10 * time.Second // after which systemd would kill the removal of the rules
				if took >= limit {
					t.Errorf("stopping took %v", took)
				}
				if sockets := m.Run("ss", "--no-header", "--listening", "--tcp", "--udp", "--numeric"); strings.Contains(sockets, ":15053") {
					t.Errorf("sockets are left:\n%s", sockets)
				}
				if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" {
					t.Errorf("processes are left:\n%s", processes)
				}
			}
			m.Systemctl("stop")
			if after := m.Net.Rules(); after != before {
				t.Errorf("rules and sets after the stop:\n%s\nand before the start:\n%s", after, before)
			}
			if way.name == "rescue.target" {
				m.Run("systemctl", "isolate", "multi-user.target")
			}
		})
	}
}

// testStopsInRestarts stops the agent while it restarts, earlier and later. If no agent starts any more, systemd removes the
// rules of the one before.
func testStopsInRestarts(t *testing.T, m *lab.Machine) {
	for round := range time.Duration(8) {
		m.Run("systemctl", "start", "nametap.service")
		m.AwaitMesh()
		m.Run("systemctl", "--no-block", "restart", "nametap.service")
		time.Sleep(round * round * 5 * time.Millisecond) //nolint:forbidigo // the moment of the stop
		m.Run("systemctl", "stop", "nametap.service")
		wait.Until(t, "no rules are left", func() bool { return !m.Captured() })
	}
}

// testHang stops the agent's process by SIGSTOP, under load, until systemd replaces it. V2.
func testHang(t *testing.T, m *lab.Machine) {
	tr := startTraffic(t, m)
	tr.outage(func() { m.Run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "nametap.service") })
	m.AwaitMesh()
}

// testCannotStart breaks the agent in several ways and restarts it. The host has DNS again within 2 s, without mesh names,
// and systemd shows the reason. A repaired agent starts. V2.
func testCannotStart(t *testing.T, m *lab.Machine) {
	program := func(text string) func() {
		return func() {
			remove(m)
			m.Write(binary, "#!/bin/sh\n"+text+"\n")
			m.Run("chmod", "755", binary)
		}
	}
	for _, way := range []struct {
		name           string
		broken, repair func()
		reason         string // in the output of systemctl status
	}{
		{"setting", func() { setDNSAddr(m, "nonsense") }, func() { setDNSAddr(m, "") }, "nonsense"},
		{"other port", func() { setDNSAddr(m, "localhost:15153") }, func() { setDNSAddr(m, "") }, "another port than dns-addr=localhost:15153"},
		{"no program", func() { remove(m) }, func() { restore(m) }, binary + " is missing"},
		{"crash", program("kill -SEGV $$"), func() { restore(m) }, "status=11/SEGV"},
		{"hang", program("exec sleep 1000"), func() { restore(m) }, "timeout"},
		{
			"no user", func() {
				m.Run("sh", "-euc", "cp /etc/passwd /etc/group /root && sed -i '/^nametap:/ d' /etc/passwd /etc/group")
			}, func() { m.Run("cp", "/root/passwd", "/root/group", "/etc") }, "217/USER",
		},
	} {
		m.Sub(t, way.name, func(t *testing.T) {
			fresh(m)
			tr := startTraffic(t, m)
			way.broken()
			tr.outage(func() { m.Run("systemctl", "restart", "--no-block", "nametap") })
			if way.name == "crash" { // systemctl status has its reason only for RestartSec.
				wait.Until(t, way.reason, func() bool { return strings.Contains(m.Journal("nametap.service"), way.reason) })
			} else {
				awaitStatus(t, m, way.reason)
			}
			way.repair()
			m.Run("systemctl", "restart", "nametap.service")
			m.AwaitMesh()
		})
	}
}

// testFullConntrack fills the table of connections, under load. The kernel then refuses packets of the whole host. The agent
// lives on, and DNS is back within 2 s when there is room. V9.
func testFullConntrack(t *testing.T, m *lab.Machine) {
	process := running(m)
	limit, err := strconv.Atoi(strings.TrimSpace(m.Read("/proc/sys/net/netfilter/nf_conntrack_max")))
	if err != nil {
		t.Fatal(err)
	}
	var entries strings.Builder
	for i := range limit { // that the kernel does not evict
		fmt.Fprintf(&entries, "-I -p tcp -s 198.18.%d.%d -d 198.19.0.1 --sport %d --dport 443 --state ESTABLISHED -t 3600 -u ASSURED,SEEN_REPLY\n",
			i>>14, i>>6&255, 1024+i&63)
	}
	tr := startTraffic(t, m)
	refused := func() int { return tr.count(load.Unsent, load.Lost, load.Failed) }
	m.Net.Pipe(entries.String(), "sh", "-c", `conntrack -R - >/dev/null 2>&1 || true`) // the last ones find no room
	wait.Until(t, "the kernel refuses packets", func() bool { return refused() > 4*queriesPerSecond })
	m.Net.Exec("conntrack", "-D", "-d", "198.19.0.1")
	began := time.Now()
	m.AwaitMesh()
	wait.Until(t, "a forwarded name has its address", func() bool { return m.Lookup(fmt.Sprintf("n%d.example.org", time.Now().UnixNano())) == lab.NamedIP })
	if took := time.Since(began) - tr.loads[0].Report().Lag; took > lapse {
		t.Errorf("DNS is back %v after there is room, want at most 2 s", took)
	}
	if now := running(m); now != process {
		t.Errorf("the agent was %s, now %s", process, now)
	}
	wait.Until(t, "no query fails", func() bool {
		before := refused() + tr.count(load.Foreign)
		tr.more(time.Second)
		return refused()+tr.count(load.Foreign) == before
	})
}
