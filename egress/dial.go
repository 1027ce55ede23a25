package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dial connects to one address.
func (s *Server) dial(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	dialer := net.Dialer{KeepAliveConfig: keepAlive()}
	for _, source := range s.config.Sources {
		if familyOf(source) == familyOf(addr.Addr()) {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
		}
	}
	dialer.ControlContext = func(_ context.Context, _, _ string, conn syscall.RawConn) error {
		if dialer.LocalAddr != nil {
			choosePortLate(conn)
		}
		return setMark(conn, s.config.Mark)
	}
	conn, err := dialer.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// setMark sets the mark of a socket's packets, unless it is 0.
func setMark(conn syscall.RawConn, mark uint32) error {
	if mark == 0 {
		return nil
	}
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) //nolint:gosec // a descriptor
	})
	if err = errors.Join(controlErr, err); err != nil {
		return fmt.Errorf("setting the mark %d (--egress-mark; it needs CAP_NET_ADMIN): %w", mark, err)
	}
	return nil
}

// choosePortLate lets the kernel choose the port of a socket with a source address when it connects.
// Otherwise it chooses one when it binds the socket, and no other connection of the host gets that port,
// whatever its destination: the connections to all hosts together, and those of other programs, would
// share the 28,000 ports that connections to one host may have. Before Linux 4.2 they do.
func choosePortLate(conn syscall.RawConn) {
	_ = conn.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1) //nolint:gosec // a descriptor
	})
}

// keepAlive returns how a connection is probed while it is idle: a peer that has vanished is noticed
// after about five minutes.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 3 * time.Minute, Interval: 20 * time.Second, Count: 6}
}

// reset closes a connection with a reset, which discards what was not sent.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // fails for a connection that was reset by the peer, only
	_ = conn.Close()
}
