package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// listen adopts the sockets of another process, or opens the listeners. Of localhost and of all
// addresses, one family may be missing. A listener on loopback is opened although the host does not have the
// address yet, because IPv6 may be switched on later.
func (s *Server) listen(ctx context.Context) error {
	if len(s.config.Sockets) > 0 {
		return s.adopt()
	}
	hosts, port, err := s.config.listenAddrs()
	if err != nil {
		return err
	}
	var errs []error
	for _, host := range hosts {
		var control func(string, string, syscall.RawConn) error
		if host.IsLoopback() {
			control = sockets.FreeBind
		}
		listener, err := listenOn(ctx, netip.AddrPortFrom(host, port), control)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.listeners = append(s.listeners, listener)
		if port == 0 { // the others get the port that the kernel chose for the first
			port = s.Addrs()[0].Port()
		}
	}
	if len(s.listeners) == 0 {
		return fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", s.config.Addr, errors.Join(errs...))
	}
	logMissing(s.log, errs)
	return nil
}

// logMissing logs why listeners are missing.
func logMissing(log *slog.Logger, errs []error) {
	for _, err := range errs {
		log.Warn("degraded: connections to VIPs of one family are not carried", "error", err)
	}
}

// adopt takes over the sockets of another process.
func (s *Server) adopt() error {
	for _, file := range s.config.Sockets {
		listener, err := net.FileListener(file)
		_ = file.Close() // it is duplicated
		tcp, ok := listener.(*net.TCPListener)
		if err == nil && !ok {
			_ = listener.Close() // no client has connected
			err = errors.New("want TCP")
		}
		if err != nil {
			s.closeListeners()
			return fmt.Errorf("inherited socket %s for connections to VIPs: %w", file.Name(), err)
		}
		s.listeners = append(s.listeners, tcp)
	}
	return nil
}

// listenOn opens one listener.
func listenOn(ctx context.Context, addr netip.AddrPort, control func(string, string, syscall.RawConn) error) (*net.TCPListener, error) {
	config := sockets.TCPConfig()
	config.KeepAliveConfig, config.Control = keepAlive(), control
	listener, err := config.Listen(ctx, fmt.Sprintf("tcp%d", familyOf(addr.Addr())), addr.String())
	if err != nil {
		return nil, err
	}
	return listener.(*net.TCPListener), nil
}

// Addrs returns the addresses that the server listens on.
func (s *Server) Addrs() []netip.AddrPort {
	addrs := make([]netip.AddrPort, 0, len(s.listeners))
	for _, l := range s.listeners {
		addrs = append(addrs, l.Addr().(*net.TCPAddr).AddrPort())
	}
	return addrs
}

// closeListeners closes the listeners.
func (s *Server) closeListeners() {
	for _, l := range s.listeners {
		_ = l.Close() // nothing is buffered
	}
}

// OpenSockets opens the sockets of addr, a [Config.Addr], for [Config.Sockets] of another process. It
// opens those of an address that this host does not have yet, too. It logs those that it cannot open,
// and fails if it can open none. The caller closes the files.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) ([]*os.File, error) {
	cfg := Config{Addr: addr}
	hosts, port, err := cfg.listenAddrs()
	if err != nil {
		return nil, err
	}
	if port == 0 {
		return nil, fmt.Errorf("egress address %q: want a port other than 0 with --supervise", addr)
	}
	var files []*os.File
	var errs []error
	for _, host := range hosts {
		file, err := openSocket(ctx, netip.AddrPortFrom(host, port))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		files = append(files, file)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", addr, errors.Join(errs...))
	}
	logMissing(log, errs)
	return files, nil
}

// openSocket opens one listening socket as a file.
func openSocket(ctx context.Context, addr netip.AddrPort) (*os.File, error) {
	listener, err := listenOn(ctx, addr, sockets.FreeBind)
	if err != nil {
		return nil, err
	}
	defer func() { _ = listener.Close() }() // the file is a duplicate
	return listener.File()
}

// Owns reports whether a socket listens on the port of addr, a [Config.Addr], over TCP: it is one of
// [OpenSockets], or one that systemd holds for the same port.
func Owns(addr string, file *os.File) bool {
	cfg := Config{Addr: addr}
	_, port, err := cfg.listenAddrs()
	if err != nil {
		return false
	}
	listener, err := net.FileListener(file) // a duplicate
	if err != nil {
		return false
	}
	defer func() { _ = listener.Close() }()
	tcp, ok := listener.Addr().(*net.TCPAddr)
	return ok && tcp.Port == int(port)
}
