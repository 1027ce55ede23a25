package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// The network of `nametap-demo vips`: a client whose gateway and nameserver is the host with the agent.
const (
	hostInterface = "demo0"
	hostAddr      = "10.244.0.1"
	clientAddr    = "10.244.0.10"
)

// unsupported is an error that says what this machine lacks.
type unsupported string

// Error returns the text.
func (u unsupported) Error() string { return string(u) }

// A client is a network namespace that is connected to the process's namespace.
type client struct{ namespace *os.File }

// newClient makes a client. The process must be alone in its network namespace.
func newClient(ctx context.Context) (*client, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	if len(interfaces) != 1 || interfaces[0].Flags&(net.FlagLoopback|net.FlagUp) != net.FlagLoopback {
		return nil, fmt.Errorf("%s: want a new network namespace, which the demo makes; run nametap-demo without arguments", vipsCommand)
	}
	// Where distributions have the tools, whatever the user's PATH is.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return nil, err
	}
	c := &client{}
	err = onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			c.namespace, err = os.Open("/proc/thread-self/ns/net")
		}
		return err
	})
	if errors.Is(err, unix.EPERM) {
		return nil, unsupported(fmt.Sprintf("network namespaces are not allowed: %v", err))
	}
	if err != nil {
		return nil, fmt.Errorf("making a network namespace: %w", err)
	}
	return c, c.connect(ctx)
}

// connect connects the client with the host, and gives the host the addresses of the databases.
func (c *client) connect(ctx context.Context) error {
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), c.namespace.Fd())
	host := []string{
		"link set lo up",
		"link add " + hostInterface + " type veth peer name eth0 netns " + path,
		"address add " + hostAddr + "/24 dev " + hostInterface,
		"link set " + hostInterface + " up",
		"address add " + databaseAddr(demoDatabase1).String() + "/32 dev lo",
		"address add " + databaseAddr(demoDatabase2).String() + "/32 dev lo",
	}
	for _, command := range host {
		if err := ip(ctx, command); err != nil {
			return err
		}
	}
	return c.run(func() error {
		return errors.Join(
			ip(ctx, "address add "+clientAddr+"/24 dev eth0"),
			ip(ctx, "link set eth0 up"),
			ip(ctx, "route add default via "+hostAddr),
		)
	})
}

// run calls f in the client's namespace. Goroutines that f starts are outside of it.
func (c *client) run(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(c.namespace.Fd()), unix.CLONE_NEWNET); err != nil { //nolint:gosec // a descriptor
			return fmt.Errorf("entering a network namespace: %w", err)
		}
		return f()
	})
}

// onThread calls f on a thread that ends afterwards.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // without an unlock, so that the thread ends with the goroutine
		result <- f()
	}()
	return <-result
}

// ip runs the command ip in the namespace of the thread.
func ip(ctx context.Context, arguments string) error {
	output, err := exec.CommandContext(ctx, "ip", strings.Fields(arguments)...).CombinedOutput() //nolint:gosec // constants
	switch text := strings.TrimSpace(string(output)); {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrNotFound):
		return unsupported("the command ip is missing")
	case strings.Contains(text, "Operation not permitted"), strings.Contains(text, "Unknown device type"), strings.Contains(text, "Operation not supported"):
		return unsupported(fmt.Sprintf("ip %s: %s", arguments, text))
	default:
		return fmt.Errorf("ip %s: %w: %s", arguments, err, text)
	}
}

// discard returns a log that keeps nothing.
func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
