// Package netns makes network namespaces for tests. Each is like a host: it has its own
// addresses, firewall rules and connection tracking, which nothing outside sees.
//
//	host := netns.New(t)
//	host.Exec("ip", "address", "add", "192.0.2.1/32", "dev", "lo")
//	host.Run(func() { conn, err = net.Dial("udp", "192.0.2.1:53") })
//
// Without root, or CAP_SYS_ADMIN, tests that need a namespace are skipped.
package netns

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// An NS is a network namespace. It is removed when its test has ended and the last socket
// and process in it are closed. Its methods may fail the test, so only the goroutine of its
// test or subtest may call them. But every goroutine may call Run.
type NS struct {
	tb   testing.TB
	file *os.File // keeps the namespace

	pairs int // number of interfaces that are the first end of a pair
}

// patience is how long a command may run. The machine may be busy.
const patience = 5 * time.Minute

// New makes a namespace whose interface lo is up. It skips the test without the
// permission to do so.
func New(tb testing.TB) *NS {
	tb.Helper()
	runtime.LockOSThread()
	home, err := current()
	if err != nil {
		runtime.UnlockOSThread()
		tb.Fatalf("opening the network namespace of the thread: %v", err)
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		leftout.Test(tb, "tests in network namespaces, they need root: %v", err)
	}
	file, err := current()
	leave(home)
	if err != nil {
		tb.Fatalf("opening a new network namespace: %v", err)
	}
	tb.Cleanup(func() { file.Close() })
	ns := &NS{tb: tb, file: file}
	ns.Exec("ip", "link", "set", "lo", "up")
	return ns
}

// current opens the network namespace of the calling thread.
func current() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }

// leave moves the locked thread back to the namespace home and unlocks it. If that fails,
// the thread stays locked, and ends with its goroutine.
func leave(home *os.File) {
	if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
}

// Run calls f in the namespace, on the calling goroutine. f may call Run, and it may fail
// the test if it runs on the test's goroutine.
//
// A socket stays in the namespace in which it was opened. Goroutines that f starts are
// outside of the namespace, so f itself must open the sockets. net.Listen opens its
// socket in the calling goroutine, and so does net.Dial with a single address. A
// goroutine can call Run to enter the namespace.
func (n *NS) Run(f func()) {
	n.tb.Helper()
	runtime.LockOSThread()
	home, err := current()
	if err != nil {
		runtime.UnlockOSThread()
		n.tb.Fatalf("opening the network namespace of the thread: %v", err)
	}
	defer home.Close()
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		n.tb.Fatalf("entering a network namespace: %v", err)
	}
	defer leave(home)
	f()
}

// Start starts a command in the namespace. The caller waits for its end.
func (n *NS) Start(cmd *exec.Cmd) error {
	n.tb.Helper()
	var err error
	n.Run(func() { err = cmd.Start() }) // a child inherits the namespace of the thread
	return err
}

// Serve starts a TCP server in the namespace, which ends with the test. It calls handle for each connection, which it
// closes afterwards.
func (n *NS) Serve(address string, handle func(conn *net.TCPConn)) {
	n.tb.Helper()
	var listener net.Listener
	var err error
	n.Run(func() { listener, err = new(net.ListenConfig).Listen(n.tb.Context(), "tcp", address) })
	if err != nil {
		n.tb.Fatal(err)
	}
	var running sync.WaitGroup
	ended, end := context.WithCancel(context.Background())
	n.tb.Cleanup(func() { end(); listener.Close(); running.Wait() })
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer conn.Close()
				defer context.AfterFunc(ended, func() { conn.Close() })()
				handle(conn.(*net.TCPConn))
			})
		}
	})
}

// Path returns a path of the namespace for other programs, such as systemd-nspawn. It is
// valid until the test ends.
func (n *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd()) }

// Exec runs a command in the namespace and returns its standard output. The test fails if
// the command fails, or runs for minutes: iptables would wait forever for an
// xtables lock that is never released.
func (n *NS) Exec(name string, args ...string) string {
	n.tb.Helper()
	return n.Pipe("", name, args...)
}

// Pipe is like Exec with input as the command's standard input.
func (n *NS) Pipe(input, name string, args ...string) string {
	n.tb.Helper()
	// Cleanup functions run after the end of the test's context.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.tb.Context()), patience)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	err := n.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		n.tb.Fatalf("%s: %v\n%s", cmd, err, &stderr)
	}
	return stdout.String()
}

// Need skips the test unless all commands are installed.
func Need(tb testing.TB, commands ...string) {
	tb.Helper()
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			leftout.Test(tb, "%s, it needs a command: %v", tb.Name(), err)
		}
	}
}

// An End is one side of a veth pair.
type End struct {
	NS    *NS
	Name  string   // of the interface
	Addrs []string // of the interface, such as "192.0.2.1/24"
}

// Connect joins two namespaces with a veth pair. The interfaces are up and their addresses
// can be used at once, without duplicate address detection.
func Connect(a, b End) {
	a.NS.tb.Helper()
	// The ends get different indexes. If they had the same index, as the first interfaces
	// of two namespaces have, the kernel would not recognise the pair, and would notice up
	// to 1 s late that both ends are up (linkwatch_urgent_event).
	a.NS.pairs++
	index := strconv.Itoa(1000 + a.NS.pairs)
	a.NS.Exec("ip", "link", "add", a.Name, "index", index, "type", "veth", "peer", "name", b.Name, "netns", b.NS.Path())
	for _, end := range []End{a, b} {
		for _, addr := range end.Addrs {
			args := []string{"address", "add", addr, "dev", end.Name}
			if strings.Contains(addr, ":") {
				// With duplicate address detection, an address would be tentative until a
				// workqueue of the kernel has processed it, and no socket could be bound to
				// it, even if the sysctl accept_dad turns detection off.
				args = append(args, "nodad")
			}
			end.NS.Exec("ip", args...)
		}
		end.NS.Exec("ip", "link", "set", end.Name, "up")
	}
	for _, end := range []End{a, b} {
		end.awaitAddrs()
	}
}

// awaitAddrs waits until the kernel delivers packets for all addresses of the end. For
// IPv6 this takes a local route, which a workqueue of the kernel adds later, also with
// nodad. Before that, packets between two sockets of the host leave through the interface
// and are lost.
func (e *End) awaitAddrs() {
	e.NS.tb.Helper()
	for _, addr := range e.Addrs {
		if !strings.Contains(addr, ":") {
			continue
		}
		host, _, _ := strings.Cut(addr, "/")
		wait.Until(e.NS.tb, e.Name+" has a local route for its address "+host, func() bool {
			return e.NS.Exec("ip", "-6", "route", "show", "table", "local", "type", "local", host) != ""
		})
	}
}
