package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"

	"github.com/nametap/nametap/internal/sockets"
)

// OpenStatusSockets opens the socket of the status address. The caller passes the socket to the process of an agent,
// for [Config.StatusSockets], and closes the files. If the port is 0, OpenStatusSockets returns no socket, and the
// agent opens its own. The same is true if the socket cannot be opened now but perhaps later, for example because
// another program uses the address.
func OpenStatusSockets(ctx context.Context, addr string, log *slog.Logger) ([]*os.File, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", addr)
	switch {
	case sockets.WrongAddr(err):
		return nil, fmt.Errorf("status address %q: want a host:port of this host (--status-addr): %w", addr, err)
	case err != nil:
		log.Warn("the status address will be closed while the agent restarts", "error", err)
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

// OwnsStatus reports whether file is a listening TCP socket for the status address addr: the socket has the port of
// addr, and is bound to the host of addr or to all addresses.
func OwnsStatus(addr string, file *os.File) bool {
	wanted, err := net.ResolveTCPAddr("tcp", addr)
	bound := sockets.TCPAddr(file)
	if err != nil || bound.Port() == 0 || int(bound.Port()) != wanted.Port {
		return false
	}
	return bound.Addr().IsUnspecified() || wanted.IP.Equal(bound.Addr().AsSlice())
}

// adoptStatus returns a listener for addr on the inherited socket file, and closes file.
func adoptStatus(addr string, file *os.File) (net.Listener, error) {
	listener, err := net.FileListener(file)
	_ = file.Close() // the listener has a duplicate
	if err != nil {
		return nil, fmt.Errorf("inherited socket %s for the status address: %w", file.Name(), err)
	}
	tcp, ok := listener.(*net.TCPListener)
	if !ok {
		_ = listener.Close() // the socket is not used
		return nil, fmt.Errorf("inherited socket %s for the status address: %w", file.Name(), errors.New("want TCP"))
	}
	wanted, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		_ = listener.Close() // the socket is not used
		return nil, fmt.Errorf("status address %q: want a host:port (--status-addr): %w", addr, err)
	}
	return &statusListener{TCPListener: tcp, host: wanted.IP}, nil
}

// A statusListener is an inherited listener. It may be bound to all addresses although the status address now has
// one host: the settings may have changed since the socket was opened.
type statusListener struct {
	*net.TCPListener
	host net.IP // the only address to serve; nil or unspecified: all
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
		_ = conn.Close() // nothing was read from it
	}
}
