package lab

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Furnish sets the loopback interface up, and mounts a file of dir over /etc/resolv.conf.
func Furnish(dir string) error {
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("setting the loopback interface up: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	path := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(path, nil, 0o644); err != nil { // as the system's
		return fmt.Errorf("writing a file: %w", err)
	}
	if err := unix.Mount(path, "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting over /etc/resolv.conf: %w", err)
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

// UseNameservers sets the nameservers of the system and of agents that start later. An agent keeps its own file when the
// system's file changes. It writes into the mounted file, because a new file would not be mounted.
func (l *Lab) UseNameservers(servers ...netip.Addr) error {
	if _, err := l.Write("resolv.conf", resolvConf(servers...)); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(l.Binaries, "resolv.conf"), resolvConf(servers...), 0o644); err != nil { // as the system's
		return fmt.Errorf("writing resolv.conf: %w", err)
	}
	return nil
}
