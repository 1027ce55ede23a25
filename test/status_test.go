package test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// dialStatus connects to the status endpoints from the host.
func (h *host) dialStatus(address string) net.Conn {
	h.tb.Helper()
	var conn net.Conn
	var err error
	h.Run(func() { conn, err = net.DialTimeout("tcp", address, patience) })
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(patience))
	}
	if err != nil {
		h.tb.Fatal(err)
	}
	return conn
}

// TestStatusOfOtherUsers checks that what is private is for root and the user of the agent: what all users
// of a VM look up, and the end of the agent.
func TestStatusOfOtherUsers(t *testing.T) { // R9
	t.Parallel()
	netns.Need(t, "setpriv")
	h := newHost(t)
	a := h.start()
	as := func(user int, args ...string) result {
		t.Helper()
		cmd := h.command(args...)
		cmd.SysProcAttr = nil
		id := strconv.Itoa(user)
		cmd.Args = append([]string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups", "--inh-caps", "-all", "--ambient-caps", "-all", cmd.Path}, cmd.Args[1:]...)
		cmd.Path, _ = exec.LookPath("setpriv") // Need has found it
		return h.run(cmd)
	}
	const other = 4711
	commands := [][]string{{"status"}, {"table"}, {"cache"}, {"cache", "flush"}}
	for _, command := range commands {
		args := append(command, "--status-addr", statusAddr)
		for _, user := range []int{0, agentID} {
			if r := as(user, args...); r.code != 0 {
				t.Errorf("%s as user %d: %d %s", command, user, r.code, r.stderr)
			}
		}
		if r := as(other, args...); r.code != 1 || !strings.Contains(r.stderr, "only root and the user of the agent may use "+h.socket()) || !strings.Contains(r.stderr, "with sudo") {
			t.Errorf("%s as another user: %d %s", command, r.code, r.stderr)
		}
	}
	for _, request := range []string{"GET /debug/cache", "GET /debug/tail", "GET /debug/ndsz", "POST /cache/flush", "POST /drain", "POST /quitquitquit"} {
		if got := h.raw(request + " HTTP/1.0\r\nHost: localhost\r\n\r\n"); got != "HTTP/1.0 403 Forbidden" {
			t.Errorf("%s on the status address: %s", request, got)
		}
	}
	if got := h.privateRaw("POST /quitquitquit HTTP/1.0\r\n\r\n"); got != "HTTP/1.0 200 OK" {
		t.Errorf("/quitquitquit: %s", got)
	}
	wait.For(t, "the agent ends", a.ended)
}

// leave leaves the private socket of an agent that ran as root and was killed.
func (h *host) leave(dir string) {
	h.tb.Helper()
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, filepath.Base(h.socket())), Net: "unix"})
	if err != nil {
		h.tb.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	if err := left.Close(); err != nil {
		h.tb.Fatal(err)
	}
}

// TestStatusInReadOnlyContainer checks that commands find the agent whose user can write to its state
// directory only, as in a pod.
func TestStatusInReadOnlyContainer(t *testing.T) { // R9
	t.Parallel()
	h := newHost(t)
	others := filepath.Join(h.dir, "others")
	if err := os.Mkdir(others, 0o755); err != nil {
		t.Fatal(err)
	}
	h.leave(others)
	h.environment = append(h.environment, "RUNTIME_DIRECTORY="+others, "NAMETAP_STATE_DIR="+h.agentDir("state"))
	h.start("--state-dir", filepath.Join(h.dir, "state"))
	for _, r := range []result{h.nametap("status", "--status-addr", statusAddr), h.root("status", "--status-addr", statusAddr)} {
		if r.code != 0 || !strings.Contains(r.stdout, "ready          yes") {
			t.Errorf("%d %s", r.code, r.stderr)
		}
	}
}

// TestSupervisedPortsTaken checks that a supervised agent answers DNS while another program has its status
// port, also after a restart, and that the supervisor holds the port over a restart once it had it.
func TestSupervisedPortsTaken(t *testing.T) { // R3, K15
	t.Parallel()
	h := newHost(t)
	h.capabilities = nil
	var taken net.Listener
	var err error
	h.Run(func() { taken, err = net.Listen("tcp", statusAddr) })
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	a := h.launch("--supervise")
	answers := func() bool { return h.digSoon("@127.0.0.1", "-p", "15053", mesh) == meshIP }
	wait.Until(t, "the agent answers", answers)
	pid := a.killChild()
	wait.Until(t, "the next agent answers", func() bool { return child(a.Process.Pid) != pid && answers() })
	if r := h.nametap("status", "--status-addr", statusAddr); r.code != 0 || !strings.Contains(r.stdout, ": the status address: listen tcp4 "+statusAddr) {
		t.Errorf("%d %s%s", r.code, r.stdout, r.stderr)
	}
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the status is served", func() bool { return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200") })
	wait.Until(t, "the log reports it", func() bool { return a.log.Count("a missing listener is open now") == 1 })
}

// TestSharedRunDirectory runs two agents with one status port in containers that share the directory of their sockets. A
// command finds the agent of its own container, and in a third container says that there is none.
func TestSharedRunDirectory(t *testing.T) { // R9
	t.Parallel()
	run := newBareHost(t).runDir()
	start := func(name string) (h *host, a *agent) {
		h = newHost(t)
		h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{name: {Ips: []string{"10.1.0.2"}}}})
		h.environment = append(h.environment, "RUNTIME_DIRECTORY="+run, "NAMETAP_STATE_DIR="+h.agentDir("state"))
		cmd := h.command("agent", "--xds-addr", h.xds.Addr(), "--xds-plaintext", "--dns-addr", dnsAddr, "--status-addr", statusAddr, "--resolv-conf", h.resolvConf)
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
		a = h.launchCommand(cmd)
		wait.Until(t, "the agent is ready", func() bool { return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200") })
		return h, a
	}
	for _, name := range []string{"first.example", "second.example"} {
		h, a := start(name)
		cmd := h.command("table", "--status-addr", statusAddr)
		cmd.SysProcAttr = nil
		cmd.Path, cmd.Args = "/usr/bin/nsenter", slices.Concat([]string{"nsenter", "--target", strconv.Itoa(a.Process.Pid), "--pid", "--"}, cmd.Args)
		if r := h.run(cmd); r.code != 0 || !strings.Contains(r.stdout, name) {
			t.Errorf("%s: %+v\n%s", name, r, a.log)
		}
	}
	h := newBareHost(t)
	h.environment = append(h.environment, "RUNTIME_DIRECTORY="+run)
	cmd := h.command("table", "--status-addr", statusAddr)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if r := h.run(cmd); r.code != 1 || !strings.Contains(r.stderr, "an agent in another container") {
		t.Errorf("without an agent: %+v", r)
	}
}
