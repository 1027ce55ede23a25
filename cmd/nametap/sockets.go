package main

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/sockets"
)

// systemdSockets returns the sockets that systemd passes to this process; none without systemd. It clears SO_REUSEADDR
// of the UDP sockets, and returns an error if a program of another user may receive their packets.
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
	return files, checkSquatters(inodes)
}

// shareSockets gives each inherited socket to a part of the agent, by the socket's address. Sockets of the status
// address go to the status server, sockets on the port for VIPs to egress, and all other sockets to DNS. If egress is
// off, its sockets are closed. A TCP socket on another port, on which there is no UDP socket, is not used: a setting
// has changed, and the unit of the sockets has not.
func shareSockets(cfg *agent.Config, egressAddr string, inherited []*os.File) {
	dns := map[uint16]bool{0: true}
	for _, file := range inherited {
		dns[sockets.UDPPort(file)] = true
	}
	var vips []*os.File // sockets for VIPs that systemd has stored
	for _, file := range inherited {
		switch port := sockets.TCPAddr(file).Port(); {
		case agent.OwnsStatus(cfg.StatusAddr, file):
			cfg.StatusSockets = append(cfg.StatusSockets, file)
		case file.Name() == agent.StatusFDName: // the status address has changed since systemd stored it
			agent.ForgetSocket(agent.StatusFDName, cfg.Logger)
			_ = file.Close() // only clients of the previous address have connected
		case file.Name() == agent.VIPsFDName:
			vips = append(vips, file)
		case egress.Owns(egressAddr, file):
			if cfg.Egress == nil {
				_ = file.Close() // another process holds it, too
				continue
			}
			cfg.Egress.Sockets = append(cfg.Egress.Sockets, file)
		case dns[port]:
			cfg.DNS.Sockets = append(cfg.DNS.Sockets, file)
		default:
			cfg.Logger.Warn("a TCP socket of nametap.socket is not used: its ListenStream and --"+egressAddrFlag+" have "+
				"different ports; change one of them",
				"ListenStream", sockets.TCPAddr(file), egressAddrFlag, egressAddr)
			_ = file.Close() // systemd holds it, too
		}
	}
	shareStored(cfg, egressAddr, vips)
}

// shareStored gives egress the sockets for connections to VIPs that systemd has stored. If a setting has changed
// since then, it closes them, and makes systemd close them, too.
func shareStored(cfg *agent.Config, addr string, vips []*os.File) {
	other := func(file *os.File) bool { return cfg.Egress == nil || !egress.Among(addr, file) }
	switch {
	case len(vips) == 0:
	case slices.ContainsFunc(vips, other):
		agent.ForgetSocket(agent.VIPsFDName, cfg.Logger)
		for _, file := range vips {
			_ = file.Close() // only clients of the previous address have connected
		}
	default:
		cfg.Egress.Sockets, cfg.Egress.OpenOthers = append(cfg.Egress.Sockets, vips...), true
	}
}

// exclusive keeps programs of other users from opening sockets on the ports of UDP sockets. systemd sets SO_REUSEADDR
// on each socket (systemd.socket(5) has no setting for it). If two sockets have this option, Linux lets any user bind
// the second one to the address and port of the first one, and the second one then receives all packets. exclusive
// clears the option. Then Linux refuses the second socket as long as any process has the first one.
func exclusive(files []*os.File) error {
	var errs []error
	for _, file := range files {
		conn, err := file.SyscallConn() // unlike Fd, it does not make the socket block
		if err == nil {
			err = conn.Control(func(fd uintptr) { errs = append(errs, exclude(int(fd))) }) //nolint:gosec // a descriptor
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
