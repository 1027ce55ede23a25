package main

import (
	"context"
	"errors"
	"fmt"
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

// A client is a network namespace that is connected to the process's namespace.
type client struct{ namespace *os.File }

// newClient makes a client. It also gives the host the addresses at which the demo's databases will listen.
func newClient(ctx context.Context) (*client, error) {
	c := &client{}
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			c.namespace, err = os.Open("/proc/thread-self/ns/net")
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("making a network namespace: %w", err)
	}
	err = ip(ctx,
		"link set lo up",
		fmt.Sprintf("link add %s type veth peer name eth0 netns /proc/%d/fd/%d", hostInterface, os.Getpid(),
			c.namespace.Fd()),
		"address add "+hostAddr+"/24 dev "+hostInterface,
		"link set "+hostInterface+" up",
		"address add "+demoAddress1+"/32 dev lo",
		"address add "+demoAddress2+"/32 dev lo",
	)
	if err != nil {
		return nil, err
	}
	return c, c.run(func() error {
		return ip(ctx, "address add "+clientAddr+"/24 dev eth0", "link set eth0 up", "route add default via "+hostAddr)
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

// ip runs the command ip with each of the arguments, in the namespace of the thread.
func ip(ctx context.Context, arguments ...string) error {
	for _, a := range arguments {
		output, err := exec.CommandContext(ctx, "ip", strings.Fields(a)...).CombinedOutput() //nolint:gosec // constants
		switch {
		case errors.Is(err, exec.ErrNotFound):
			return errors.New("the command ip is missing")
		case err != nil:
			return fmt.Errorf("ip %s: %w: %s", a, err, strings.TrimSpace(string(output)))
		}
	}
	return nil
}
