// Package netns makes network namespaces for tests: hosts of their own, with their
// own addresses, firewall rules and connection tracking, which nothing outside sees.
//
//	host := netns.New(t)
//	host.Exec("ip", "address", "add", "192.0.2.1/32", "dev", "lo")
//	host.Run(func() { conn, err = net.Dial("udp", "192.0.2.1:53") })
//
// Without root, or CAP_SYS_ADMIN, tests that need one are skipped.
package netns

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// execTimeout is the time after which a command is killed. With a held xtables lock a
// command waits forever.
const execTimeout = 10 * time.Second

// An NS is a network namespace. It is removed when its test has ended and the last socket
// and process in it are closed. Its methods may fail the test, so only the goroutine of its
// test or subtest may call them, except Run, which every goroutine may call.
type NS struct {
	tb   testing.TB
	file *os.File // keeps it alive

	pairs int // how many interfaces are the first end of a pair
}

// New makes a namespace whose lo is up. It skips the test if that is not permitted.
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
		tb.Skipf("LEFT OUT: tests in network namespaces, they need root: %v", err)
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

// leave brings the locked thread back to home and unlocks it. If it cannot, it
// leaves it locked, so that the thread ends with its goroutine.
func leave(home *os.File) {
	if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
}

// Run calls f in the namespace, on the calling goroutine, so on the test's own f may
// fail the test. Run may be called within f.
// Sockets stay in the namespace in which they were opened. Goroutines that f starts
// are not in it: what opens sockets must do so in f itself, as net.Listen does, and
// net.Dial with one address. A goroutine that is to be in it calls Run itself.
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

// Start starts a command in the namespace; the caller waits for it.
func (n *NS) Start(cmd *exec.Cmd) error {
	n.tb.Helper()
	var err error
	n.Run(func() { err = cmd.Start() }) // a child is born where its parent's thread is
	return err
}

// Exec runs a command in the namespace and returns its standard output. The test
// fails if the command does.
func (n *NS) Exec(name string, args ...string) string {
	n.tb.Helper()
	return n.Pipe("", name, args...)
}

// Pipe is like Exec with input as the command's standard input.
func (n *NS) Pipe(input, name string, args ...string) string {
	n.tb.Helper()
	// The test's context has ended when clean-up functions run.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.tb.Context()), execTimeout)
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

// Need skips the test unless these commands are installed.
func Need(tb testing.TB, commands ...string) {
	tb.Helper()
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			tb.Skipf("LEFT OUT: %s, it needs a command: %v", tb.Name(), err)
		}
	}
}

// An End is one side of a veth pair.
type End struct {
	NS    *NS
	Name  string   // the interface's
	Addrs []string // its addresses, such as "192.0.2.1/24"
}

// Connect joins two namespaces with a veth pair whose interfaces are up and whose
// addresses can be used at once: no duplicates are looked for.
func Connect(a, b End) {
	a.NS.tb.Helper()
	peer := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.NS.file.Fd())
	// If both ends had one index, as the first ones of two namespaces have, the
	// kernel would take them for no pair and notice only up to 1 s later
	// that both are up (linkwatch_urgent_event).
	a.NS.pairs++
	index := strconv.Itoa(1000 + a.NS.pairs)
	a.NS.Exec("ip", "link", "add", a.Name, "index", index, "type", "veth", "peer", "name", b.Name, "netns", peer)
	for _, end := range []End{a, b} {
		for _, addr := range end.Addrs {
			args := []string{"address", "add", addr, "dev", end.Name}
			if strings.Contains(addr, ":") {
				// With the sysctl accept_dad, an address would be tentative all the same
				// until the kernel's workqueue has looked at it, and not for binding.
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

// awaitAddrs returns when the kernel delivers packets for all addresses of the end. A
// workqueue of the kernel adds the route that does so for IPv6, also with nodad; until
// then a packet from one socket of the host to another leaves through the interface and
// is lost.
func (e *End) awaitAddrs() {
	e.NS.tb.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	deadline := time.Now().Add(execTimeout)
	for _, addr := range e.Addrs {
		if !strings.Contains(addr, ":") {
			continue
		}
		host, _, _ := strings.Cut(addr, "/")
		for e.NS.Exec("ip", "-6", "route", "show", "table", "local", "type", "local", host) == "" {
			if time.Now().After(deadline) {
				e.NS.tb.Fatalf("%s: no route to its own address %s", e.Name, host)
			}
			<-ticker.C
		}
	}
}
