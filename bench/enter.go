package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"golang.org/x/sys/unix"
)

// enter runs this command again with argv, in new network and mount namespaces. In these,
// nameservers can use port 53, and programs read the experiment's /etc/resolv.conf. A user
// other than root is root in a new user namespace. Binaries are built before, because
// building needs the network.
func enter(ctx context.Context, o options, argv []string) (err error) {
	dir, err := os.MkdirTemp("", "nametap-bench-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := requirements(&o); err != nil {
		return err
	}
	if err := buildAll(ctx, o, dir); err != nil {
		return err
	}
	inside := exec.CommandContext(ctx, "/proc/self/exe", slices.Concat(argv, []string{"-" + insideFlag, dir})...)
	inside.Stdin, inside.Stdout, inside.Stderr = os.Stdin, os.Stdout, os.Stderr
	inside.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL, Setpgid: true,
	}
	if uid, gid := os.Getuid(), os.Getgid(); uid != 0 {
		inside.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		inside.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
		inside.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: gid, Size: 1}}
	}
	inside.Cancel = func() error { return inside.Process.Signal(syscall.SIGTERM) }
	inside.WaitDelay = 10 * time.Second
	if err := inside.Run(); err != nil {
		return fmt.Errorf("measuring in new namespaces: %w", err)
	}
	return nil
}

// buildAll builds the servers of the experiments. A peer that cannot be built is left out
// later, with the reason.
func buildAll(ctx context.Context, o options, dir string) error {
	l := &lab.Lab{Binaries: dir}
	for _, pkg := range []string{"ads", "fixed"} {
		if _, err := l.Build(ctx, ".", pkg); err != nil {
			return err
		}
	}
	if o.agent == "" {
		if _, err := l.Build(ctx, "..", "cmd/nametap"); err != nil {
			return err
		}
	}
	for _, peer := range []string{"istio", "coredns"} {
		if _, err := l.Build(ctx, peer, "."); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	}
	return ctx.Err()
}
