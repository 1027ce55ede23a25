package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Files of the system that the experiments have their own of, by the names that
// these have beside the binaries.
const (
	systemResolvConf = "resolv.conf"
	systemNSSwitch   = "nsswitch.conf"
)

// enter runs this command with argv again, in a network and a mount namespace of
// its own, which end with it: nameservers can have port 53 there, and whoever reads
// /etc/resolv.conf gets the experiment's. Not being root, it is root in a user
// namespace of its own. What needs the network, building, is done before.
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

// buildAll builds what experiments start. A peer that cannot be built is left out
// later, with the reason.
func buildAll(ctx context.Context, o options, dir string) error {
	l := &lab{binaries: dir}
	for _, pkg := range []string{"ads", "fixed"} {
		if _, err := l.build(ctx, ".", pkg); err != nil {
			return err
		}
	}
	if o.agent == "" {
		if _, err := l.build(ctx, "..", "cmd/nametap"); err != nil {
			return err
		}
	}
	for _, peer := range []string{"istio", "coredns"} {
		if _, err := l.build(ctx, peer, "."); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	}
	return ctx.Err()
}

// furnish makes the namespaces usable: the loopback interface is up, and files of
// dir stand in for the system's.
func furnish(dir string) error {
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("setting the loopback interface up: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	for name, content := range map[string]string{systemResolvConf: "", systemNSSwitch: "hosts: files dns\n"} {
		target := filepath.Join("/etc", name)
		if _, err := os.Stat(target); errors.Is(err, os.ErrNotExist) && name == systemNSSwitch {
			continue // the C library's default will do
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil { // as the system's
			return fmt.Errorf("writing a file: %w", err)
		}
		if err := unix.Mount(path, target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting over %s: %w", target, err)
		}
	}
	return nil
}

// loopbackUp is ip link set lo up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, lo); err != nil {
		return err
	}
	lo.SetUint16(lo.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}

// useNameservers makes them those of the system and of agents that start after it.
// An agent goes on reading a file that only it has, whatever the system's becomes.
func (l *lab) useNameservers(servers ...netip.Addr) error {
	if _, err := l.write("resolv.conf", resolvConf(servers...)); err != nil {
		return err
	}
	return l.systemNameservers(servers...)
}

// systemNameservers changes what programs read that start from now on. It writes
// the file that is mounted, since a new one would not be.
func (l *lab) systemNameservers(servers ...netip.Addr) error {
	path := filepath.Join(l.binaries, systemResolvConf)
	if err := os.WriteFile(path, resolvConf(servers...), 0o644); err != nil { // as the system's
		return fmt.Errorf("writing resolv.conf: %w", err)
	}
	return nil
}
