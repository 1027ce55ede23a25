package main

import (
	"errors"
	"os"
	"strconv"
	"syscall"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
)

// systemdSockets returns the sockets of systemd, none without it, for this process alone.
func systemdSockets() ([]*os.File, error) {
	files := activation.Files(true)
	if err := exclusive(files); err != nil || len(files) == 0 {
		return files, err
	}
	inodes := map[string]bool{}
	for _, file := range files {
		info, err := file.Stat()
		if err != nil {
			return files, err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			inodes[strconv.FormatUint(stat.Ino, 10)] = true
		}
	}
	return files, alone(inodes)
}

// shareSockets gives inherited sockets to the parts of the agent: those on the port for VIPs to egress,
// or to none if it is off, and the others to DNS.
func shareSockets(cfg *agent.Config, egressAddr string, sockets []*os.File) {
	for _, file := range sockets {
		switch {
		case !egress.Owns(egressAddr, file):
			cfg.DNS.Sockets = append(cfg.DNS.Sockets, file)
		case cfg.Egress != nil:
			cfg.Egress.Sockets = append(cfg.Egress.Sockets, file)
		default:
			_ = file.Close() // another process holds it, too
		}
	}
}

// exclusive keeps the programs of other users from the ports of UDP sockets. systemd sets
// SO_REUSEADDR on each socket (systemd.socket(5) has no setting for it), and with it on both
// sockets Linux lets any user bind another UDP socket to the same address and port, which then
// receives all packets. It is not allowed again while any process has the socket.
func exclusive(files []*os.File) error {
	var errs []error
	for _, file := range files {
		conn, err := file.SyscallConn() // unlike Fd, it does not make the socket block
		if err == nil {
			err = errors.Join(err, conn.Control(func(fd uintptr) { errs = append(errs, exclude(int(fd))) })) //nolint:gosec // a descriptor
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// exclude clears SO_REUSEADDR of a UDP socket.
func exclude(fd int) error {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind == unix.SOCK_DGRAM {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0)
	}
	return os.NewSyscallError("clearing SO_REUSEADDR of a socket of systemd", err)
}
