package agent

import (
	"errors"
	"log/slog"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// The names under which systemd stores listening sockets of the agent, which it passes to the next process after a
// restart: so no other program takes the port meanwhile, and connections wait. These are not sockets of
// nametap.socket: if the port were taken, that unit would fail, and DNS with it.
const (
	StatusFDName = "status" // of the status address
	VIPsFDName   = "vips"   // for connections to automatic VIPs
)

// storeSocket lets systemd store a listening socket, if systemd runs the agent, and reports whether it was sent.
func storeSocket(name string, listener net.Listener, log *slog.Logger) bool {
	tcp, ok := listener.(*net.TCPListener)
	if !ok || os.Getenv("NOTIFY_SOCKET") == "" {
		return false
	}
	file, err := tcp.File()
	if err == nil {
		err = errors.Join(notifyWith("FDSTORE=1\nFDNAME="+name, file), file.Close())
	}
	if err != nil {
		log.Warn("systemd does not hold a socket over a restart", "name", name, "address", listener.Addr(), "error", err)
	}
	return err == nil
}

// ForgetSocket lets systemd close the sockets that it has stored under a name.
func ForgetSocket(name string, log *slog.Logger) {
	if err := notifyWith("FDSTOREREMOVE=1\nFDNAME="+name, nil); err != nil {
		log.Warn("systemd still holds sockets of previous settings", "name", name, "error", err)
	}
}

// notifyWith sends a state to systemd, with a file unless it is nil: see sd_pid_notify_with_fds(3). It does not
// wait for systemd.
func notifyWith(state string, file *os.File) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	send := func(rights []byte) error {
		to := &unix.SockaddrUnix{Name: os.Getenv("NOTIFY_SOCKET")}
		return os.NewSyscallError("notifying systemd", unix.Sendmsg(fd, []byte(state), rights, to, unix.MSG_DONTWAIT))
	}
	if file == nil {
		return send(nil)
	}
	raw, err := file.SyscallConn() // unlike Fd, it does not make the socket block
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) { sendErr = send(unix.UnixRights(int(fd))) }) //nolint:gosec // a descriptor
	return errors.Join(err, sendErr)
}
