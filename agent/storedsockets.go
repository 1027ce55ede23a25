package agent

import (
	"errors"
	"log/slog"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// The names under which systemd stores listening sockets of the agent. systemd passes the sockets to the next
// process after a restart, so no other program can take the port during the restart, and new connections wait.
// These sockets are not part of nametap.socket: if another program had the port, that unit would fail, and DNS with
// it.
const (
	StatusFDName = "status" // sockets of the status address
	VIPsFDName   = "vips"   // sockets for connections to automatic VIPs
)

// storeSocket sends a listening socket to systemd, which stores the socket under name. It does nothing if systemd
// does not run the agent. It reports whether the socket was sent.
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
		log.Warn("systemd does not keep a socket while the agent restarts", "name", name, "address", listener.Addr(), "error", err)
	}
	return err == nil
}

// ForgetSocket makes systemd close the sockets that it has stored under name.
func ForgetSocket(name string, log *slog.Logger) {
	if err := notifyWith("FDSTOREREMOVE=1\nFDNAME="+name, nil); err != nil {
		log.Warn("systemd still holds sockets of previous settings", "name", name, "error", err)
	}
}

// notifyWith sends state to systemd, and file if it is not nil: see sd_pid_notify_with_fds(3). It does not wait for
// systemd.
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
	raw, err := file.SyscallConn() // unlike Fd, SyscallConn leaves the socket non-blocking
	if err != nil {
		return err
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) { sendErr = send(unix.UnixRights(int(fd))) }) //nolint:gosec // a descriptor
	return errors.Join(err, sendErr)
}
