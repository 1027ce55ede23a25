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

// Files of the system that the experiments replace, by the names of their replacements
// beside the binaries.
const (
	systemResolvConf = "resolv.conf"
	systemNSSwitch   = "nsswitch.conf"
)

// enter runs this command again with argv, in new network and mount namespaces. In these,
// nameservers can use port 53, and programs read the experiment's /etc/resolv.conf. If the
// user is not root, it is root in a new user namespace. Binaries are built before, because
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

// furnish sets the loopback interface up, and mounts the files of dir over the system's.
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
			continue // the C library's default is used
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

// loopbackUp does the same as `ip link set lo up`.
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

// useNameservers sets the nameservers of the system and of agents that start later. An
// agent keeps its own file when the system's changes.
func (l *lab) useNameservers(servers ...netip.Addr) error {
	if _, err := l.write("resolv.conf", resolvConf(servers...)); err != nil {
		return err
	}
	return l.systemNameservers(servers...)
}

// systemNameservers sets the nameservers of programs that start later. It writes into the
// mounted file, because a new file would not be mounted.
func (l *lab) systemNameservers(servers ...netip.Addr) error {
	path := filepath.Join(l.binaries, systemResolvConf)
	if err := os.WriteFile(path, resolvConf(servers...), 0o644); err != nil { // as the system's
		return fmt.Errorf("writing resolv.conf: %w", err)
	}
	return nil
}
