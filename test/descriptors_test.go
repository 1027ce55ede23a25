package test

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// limitFiles sets the limit of descriptors of the agent, as the agent's user: root may lack the right in a container.
func (a *agent) limitFiles(n uint64) {
	a.host.tb.Helper()
	info, err := os.Stat(fmt.Sprintf("/proc/%d", a.Process.Pid))
	if err != nil {
		a.host.tb.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	// The hard limit could not be raised again.
	cmd := exec.CommandContext(a.host.tb.Context(), "prlimit", fmt.Sprintf("--pid=%d", a.Process.Pid), fmt.Sprintf("--nofile=%d:", n))
	if int(owner.Uid) != os.Getuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		a.host.tb.Fatalf("%v: %v\n%s", cmd, err, output)
	}
}

// exhaust limits the descriptors of the agent to fewer than it has open: to those below the lowest one that is free in
// any of several looks.
func (a *agent) exhaust() {
	a.host.tb.Helper()
	lowest := a.freeFile()
	a.look(func(int) { lowest = min(lowest, a.freeFile()) })
	a.limitFiles(lowest)
}

// leave limits the descriptors of the agent to those that it has open for long, some of which it keeps in reserve, and
// some more. Others among them may be free, until clients connect.
func (a *agent) leave(more uint64) {
	a.host.tb.Helper()
	open, highest := map[string]int{}, uint64(0)
	a.look(func(n int) {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.Process.Pid))
		if err != nil {
			a.host.tb.Fatal(err)
		}
		for _, file := range files {
			if open[file.Name()] == n {
				open[file.Name()]++
			}
		}
	})
	for name, times := range open {
		number, _ := strconv.ParseUint(name, 10, 64)
		own, _ := os.Readlink("/proc/self/fd/" + name)
		if its, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", a.Process.Pid, name)); times == looks && its != own { // not inherited
			highest = max(highest, number)
		}
	}
	a.limitFiles(highest + 1 + more)
}

// looks is how often the descriptors of an agent are looked at.
const looks = 30

func (a *agent) look(at func(n int)) {
	for n := range looks {
		at(n)
		time.Sleep(50 * time.Millisecond) //nolint:forbidigo // what is open for a moment is closed meanwhile
	}
}

// connect opens a TCP connection to the agent that ends with the test.
func (h *host) connect() net.Conn {
	h.tb.Helper()
	var conn net.Conn
	var err error
	h.Run(func() { conn, err = net.DialTimeout("tcp", dnsAddr, patience) })
	if err == nil {
		h.tb.Cleanup(func() { conn.Close() })
		err = conn.SetDeadline(time.Now().Add(patience))
	}
	if err != nil {
		h.tb.Fatal(err)
	}
	return conn
}

// answered queries the mesh name on a connection, and returns an error if there is no
// answer.
func answered(conn net.Conn) error {
	client := dns.Conn{Conn: conn}
	if err := client.WriteMsg(new(dns.Msg).SetQuestion(mesh+".", dns.TypeA)); err != nil {
		return err
	}
	_, err := client.ReadMsg()
	return err
}

// TestOutOfDescriptors checks that mesh names are answered while no descriptor is free:
// over UDP, and over TCP to one client at a time. Idle connections make room.
func TestOutOfDescriptors(t *testing.T) { // R3, A12
	t.Parallel()
	h := newHost(t)
	h.sameUser = true // otherwise the test could not change the limits of the agent
	a := h.start()
	wait.Until(t, "the control plane is connected", func() bool { return h.metric("nametap_xds_connected") == 1 })
	ask := func(when string) {
		t.Helper()
		for range 20 {
			h.digs(meshIP, "@127.0.0.1", "-p", "15053", mesh)
			if err := answered(h.connect()); err != nil {
				t.Errorf("%s, over TCP: %v", when, err)
			}
		}
	}
	// The agent keeps its open descriptors and gets no new ones.
	began := time.Now()
	a.leave(0)
	ask("without descriptors")
	a.leave(8)
	var idle []net.Conn
	for range 100 {
		conn := h.connect()
		if err := answered(conn); err != nil { // without a query, the kernel keeps the connection for a while
			t.Errorf("while others are idle: %v", err)
		}
		idle = append(idle, conn)
	}
	ask("with idle connections")
	if err := answered(idle[0]); err == nil {
		t.Error("no idle connection was closed for others")
	}
	select {
	case <-a.ended:
		t.Fatal("the agent has ended")
	default:
	}
	a.limitFiles(1024)
	wait.Until(t, "errors are counted", func() bool { return h.metric("nametap_dns_listener_errors_total") > 0 })
	if n, seconds := a.log.Count("reading from a listener failed"), int(time.Since(began).Seconds()); n == 0 || n > 4*(seconds+1) {
		t.Errorf("the log reports it in %d lines in %d s", n, seconds)
	}
}

// TestProbesOutOfDescriptors checks that probes and nametap doctor are answered soon while no descriptor is free and
// other clients of the status address send nothing, or take no response.
func TestProbesOutOfDescriptors(t *testing.T) { // R3, R9
	t.Parallel()
	h := newHost(t)
	h.sameUser = true // otherwise the test could not change the limits of the agent
	a := h.start()
	for _, free := range []uint64{0, 3} {
		a.leave(free)
		for i := range 100 {
			conn := h.dialStatus(statusAddr)
			defer conn.Close()
			if request := []string{"", "GET /metrics HTTP/1.1\r\n", "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"}[i%3]; request != "" {
				if _, err := io.WriteString(conn, request); err != nil {
					t.Fatal(err)
				}
			}
		}
		for range 20 {
			if got := h.raw("GET /healthz/ready HTTP/1.0\r\nHost: localhost\r\n\r\n"); got != "HTTP/1.0 200 OK" {
				t.Errorf("%d free descriptors: a probe: %s", free, got)
			}
		}
		if r := h.root("doctor", "--status-addr", statusAddr); !strings.Contains(r.stdout, "no free descriptors") {
			t.Errorf("%d free descriptors: doctor: %d %s %s", free, r.code, r.stdout, r.stderr)
		}
	}
}
