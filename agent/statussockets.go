package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// OpenStatusSockets opens the socket of the status address for [Config.StatusSockets] of another
// process. It returns none if the address is taken: the agent then opens it later. The caller
// closes the files.
func OpenStatusSockets(ctx context.Context, addr string, log *slog.Logger) ([]*os.File, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", addr)
	switch {
	case sockets.WrongAddr(err):
		return nil, fmt.Errorf("status address %q: want a host:port of this host (--status-addr): %w", addr, err)
	case err != nil:
		log.Warn("the status address is not held over a restart of the agent", "error", err)
		return nil, nil
	}
	defer func() { _ = listener.Close() }() // the file is a duplicate
	if portOf(addr) == 0 {
		return nil, nil // each agent gets another port
	}
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return nil, err
	}
	return []*os.File{file}, nil
}

// OwnsStatus reports whether a socket is a listening TCP socket for a status address: it has its port, and
// its host or all addresses.
func OwnsStatus(addr string, file *os.File) bool {
	wanted, err := net.ResolveTCPAddr("tcp", addr)
	bound := sockets.TCPAddr(file)
	if err != nil || bound.Port() == 0 || int(bound.Port()) != wanted.Port {
		return false
	}
	return bound.Addr().IsUnspecified() || wanted.IP.Equal(bound.Addr().AsSlice())
}

// StatusFDName is the name under which systemd stores the socket of the status address, from which it
// returns to the next process after a restart, so that no other program takes the port meanwhile. The
// socket is not one of nametap.socket: if the port were taken, that unit would fail, and DNS with it.
const StatusFDName = "status"

// storeStatusSocket lets systemd store the socket of the status address, if systemd runs the agent.
func storeStatusSocket(listener net.Listener, log *slog.Logger) {
	tcp, ok := listener.(*net.TCPListener)
	if !ok || os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	file, err := tcp.File()
	if err == nil {
		err = errors.Join(notifyWith(fdStore, file), file.Close())
	}
	if err != nil {
		log.Warn("systemd does not hold the status address over a restart", "error", err)
	}
}

// ForgetStatusSocket lets systemd close the socket that it has stored.
func ForgetStatusSocket(log *slog.Logger) {
	if err := notifyWith(fdRemove, nil); err != nil {
		log.Warn("systemd still holds the previous status address", "error", err)
	}
}

// The notifications about the stored socket: see sd_pid_notify_with_fds(3).
const (
	fdStore  = "FDSTORE=1\nFDNAME=" + StatusFDName
	fdRemove = "FDSTOREREMOVE=1\nFDNAME=" + StatusFDName
)

// notifyWith sends a state to systemd, with a file unless it is nil. It does not wait for systemd.
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

// adoptStatus returns the listener of an inherited socket, and closes the file.
func adoptStatus(addr string, file *os.File) (net.Listener, error) {
	listener, err := net.FileListener(file)
	_ = file.Close() // it is duplicated
	if err != nil {
		return nil, fmt.Errorf("inherited socket %s for the status address: %w", file.Name(), err)
	}
	tcp, ok := listener.(*net.TCPListener)
	if !ok {
		_ = listener.Close() // no client has connected
		return nil, fmt.Errorf("inherited socket %s for the status address: %w", file.Name(), errors.New("want TCP"))
	}
	wanted, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		_ = listener.Close() // no client has connected
		return nil, fmt.Errorf("status address %q: want a host:port (--status-addr): %w", addr, err)
	}
	return &statusListener{TCPListener: tcp, host: wanted.IP}, nil
}

// A statusListener is an inherited listener, which may be bound to more addresses than the status
// address has: the settings of the agent may have changed since it was opened.
type statusListener struct {
	*net.TCPListener
	host net.IP // nil and unspecified are all
}

// Accept returns the next connection to the status address.
func (l *statusListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.TCPListener.Accept()
		if err != nil || l.host == nil || l.host.IsUnspecified() {
			return conn, err
		}
		if local, ok := conn.LocalAddr().(*net.TCPAddr); ok && local.IP.Equal(l.host) {
			return conn, nil
		}
		_ = conn.Close() // it was not read
	}
}
