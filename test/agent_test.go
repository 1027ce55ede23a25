package test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// An agent is a running nametap agent.
type agent struct {
	*exec.Cmd
	host  *host
	log   *testlog.Buffer
	ended chan struct{}
}

// start starts an agent with the host's control plane and resolv.conf, and more flags, and
// returns when it is ready. Like the unit, it runs as user and group agentID with only
// CAP_NET_ADMIN, unless the fields of the host say otherwise.
func (h *host) start(flags ...string) *agent {
	h.tb.Helper()
	a := h.launch(flags...)
	wait.Until(h.tb, "the agent is ready", func() bool {
		select {
		case <-a.ended:
			h.tb.Fatal("the agent ended")
		default:
		}
		return strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200")
	})
	return a
}

// launch starts an agent without waiting.
func (h *host) launch(flags ...string) *agent {
	h.tb.Helper()
	args := slices.Concat([]string{
		"agent", "--xds-addr", h.xds.Addr(), "--xds-plaintext", "--dns-addr", dnsAddr, "--status-addr", statusAddr,
		"--resolv-conf", h.resolvConf, "--drain", "10ms", "--state-dir", "",
	}, h.flags, flags)
	return h.launchCommand(h.command(args...))
}

// launchCommand starts a command that is an agent, and ends it after the test.
func (h *host) launchCommand(cmd *exec.Cmd) *agent {
	h.tb.Helper()
	a := &agent{Cmd: cmd, host: h, log: testlog.New(h.tb), ended: make(chan struct{})}
	a.Stdout, a.Stderr = a.log, a.log
	if len(h.sockets) > 0 {
		a.ExtraFiles = h.sockets
		a.Env = append(a.Env, fmt.Sprintf("LISTEN_FDS=%d", len(h.sockets)))
		wrapped := a.Args
		if h.wrapper != "" {
			wrapped = append([]string{h.wrapper}, wrapped...)
		}
		a.Path, a.Args = "/bin/sh", append([]string{"sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`}, wrapped...)
	}
	if h.terminal {
		a.ExtraFiles = append(a.ExtraFiles, openTerminal(h.tb))
		a.SysProcAttr.Setctty, a.SysProcAttr.Ctty = true, 2+len(a.ExtraFiles)
	}
	if err := h.Start(a.Cmd); err != nil {
		h.tb.Fatal(err)
	}
	machine.follow(h.tb, a.Process.Pid)
	go func() {
		_ = a.Wait() // how it ended is in the log
		close(a.ended)
	}()
	h.tb.Cleanup(func() { a.end(h.signal) })
	return a
}

// end sends a signal and returns when the process has ended.
func (a *agent) end(signal os.Signal) {
	a.host.tb.Helper()
	_ = a.Process.Signal(signal)            // it may have ended
	defer func() { _ = a.Process.Kill() }() // if it does not end on that
	wait.For(a.host.tb, fmt.Sprintf("the agent ends on %v", signal), a.ended)
}

// supervised starts an agent with --supervise that keeps snapshots.
func (h *host) supervised(flags ...string) *agent {
	h.tb.Helper()
	state := filepath.Join(h.dir, "state")
	if err := os.Mkdir(state, 0o777); err != nil {
		h.tb.Fatal(err)
	}
	if err := os.Chmod(state, 0o777); err != nil {
		h.tb.Fatal(err)
	}
	a := h.start(append([]string{"--supervise", "--state-dir", state}, flags...)...)
	wait.Until(h.tb, "there is a snapshot", func() bool {
		_, err := os.Stat(filepath.Join(state, "nametable.snapshot"))
		return err == nil
	})
	return a
}

// child returns the process that a supervisor has started, 0 if there is none.
func child(supervisor int) int {
	if children := process.Children(supervisor); len(children) > 0 {
		return children[0]
	}
	return 0
}

// killChild kills the supervised agent, and returns its process number.
func (a *agent) killChild() int {
	a.host.tb.Helper()
	var pid int
	wait.Until(a.host.tb, "the agent runs", func() bool { pid = child(a.Process.Pid); return pid != 0 })
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		a.host.tb.Fatal(err)
	}
	return pid
}

// openFiles returns the number of descriptors that the agent has open.
func (a *agent) openFiles() uint64 {
	a.host.tb.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.Process.Pid))
	if err != nil {
		a.host.tb.Fatal(err)
	}
	return uint64(len(files))
}

// freeFile returns the lowest number of a descriptor that the agent has not open. A limit is one of numbers, so that this
// limit leaves none.
func (a *agent) freeFile() (number uint64) {
	a.host.tb.Helper()
	for ; ; number++ {
		_, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", a.Process.Pid, number))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return number
		case err != nil:
			a.host.tb.Fatal(err)
		}
	}
}

// get returns the response of the agent's status endpoint with its header, or an empty
// string if no process listens. It asks on the private socket for what is private.
func (h *host) get(path string) string {
	h.tb.Helper()
	if strings.HasPrefix(path, "/debug/") {
		conn, err := net.DialTimeout("unix", h.socket(), patience)
		return h.getFrom(conn, err, path)
	}
	var response string
	h.Run(func() {
		conn, err := net.DialTimeout("tcp", statusAddr, patience)
		response = h.getFrom(conn, err, path)
	})
	return response
}

// socket returns the path of the private socket of the host's agent.
func (h *host) socket() string { return filepath.Join(h.runDir(), "status-15054.sock") }

// getFrom is get on a connection, unless it has failed.
func (h *host) getFrom(conn net.Conn, err error, path string) string {
	h.tb.Helper()
	if err != nil {
		return ""
	}
	defer conn.Close()
	var response []byte
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		h.tb.Fatal(err)
	}
	if _, err = fmt.Fprintf(conn, "GET %s HTTP/1.0\r\n\r\n", path); err == nil {
		response, err = io.ReadAll(conn)
	}
	if err != nil && !errors.Is(err, syscall.ECONNRESET) { // a listener that was closed
		h.tb.Fatal(err)
	}
	return string(response)
}

// metric returns the value of one of the agent's metrics.
func (h *host) metric(name string) float64 {
	h.tb.Helper()
	for line := range strings.Lines(h.get("/metrics")) {
		if text, found := strings.CutPrefix(line, name+" "); found {
			value, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err != nil {
				h.tb.Fatal(err)
			}
			return value
		}
	}
	h.tb.Fatalf("there is no metric %s", name)
	return 0
}

// raw sends a request to the status address unchanged, and returns the status line.
func (h *host) raw(request string) string {
	h.tb.Helper()
	return h.rawTo(h.dialStatus(statusAddr), request)
}

// privateRaw is raw to the private socket.
func (h *host) privateRaw(request string) string {
	h.tb.Helper()
	conn, err := net.Dial("unix", h.socket())
	if err != nil {
		h.tb.Fatal(err)
	}
	return h.rawTo(conn, request)
}

// rawTo sends a request to a connection unchanged, and returns the status line.
func (h *host) rawTo(conn net.Conn, request string) string {
	h.tb.Helper()
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		h.tb.Fatal(err)
	}
	response, err := io.ReadAll(conn)
	if err != nil {
		h.tb.Fatal(err)
	}
	line, _, _ := strings.Cut(string(response), "\r\n")
	return line
}

// notifications sets the environment of a service with a watchdog for the host's agents,
// and returns a function that reads their next notification, other than those about stored sockets.
func (h *host) notifications() (next func() string) {
	h.tb.Helper()
	path := filepath.Join(h.dir, "notify")
	notified, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err != nil {
		h.tb.Fatal(err)
	}
	h.tb.Cleanup(func() { notified.Close() })
	if err := os.Chmod(path, 0o777); err != nil {
		h.tb.Fatal(err)
	}
	h.environment = append(h.environment, "NOTIFY_SOCKET="+path, "WATCHDOG_USEC=300000")
	return func() string {
		h.tb.Helper()
		if err := notified.SetReadDeadline(time.Now().Add(patience)); err != nil {
			h.tb.Fatal(err)
		}
		buffer := make([]byte, 512)
		for {
			n, err := notified.Read(buffer)
			if err != nil {
				h.tb.Fatal(err)
			}
			if text := string(buffer[:n]); !strings.HasPrefix(text, "FDSTORE") {
				return text
			}
		}
	}
}
