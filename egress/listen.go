package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/sockets"
)

// listen adopts the sockets of another process, or opens the listeners. Those that cannot be opened are
// missing. It fails if all are, because the address is wrong. A listener on loopback is opened although the
// host does not have the address yet, because IPv6 may be switched on later.
func (s *Server) listen(ctx context.Context) error {
	if err := s.adopt(); err != nil {
		return err
	}
	if len(s.listeners) > 0 && !s.config.OpenOthers {
		return nil
	}
	hosts, port, err := s.config.listenAddrs()
	if err != nil {
		return err
	}
	s.missing = map[netip.AddrPort]error{}
	var errs []error
	for _, host := range hosts {
		addr := netip.AddrPortFrom(host, port)
		if slices.Contains(s.Addrs(), addr) {
			continue
		}
		listener, err := s.openListener(ctx, addr)
		if err != nil {
			errs = append(errs, err)
			s.missing[addr] = err
			continue
		}
		s.listeners = append(s.listeners, listener)
		if port == 0 { // the others get the port that the kernel chose for the first
			port = s.Addrs()[0].Port()
		}
	}
	if len(s.listeners) == 0 && !slices.ContainsFunc(errs, passing) {
		return fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", s.config.Addr, errors.Join(errs...))
	}
	logMissing(s.log, errs)
	return nil
}

// openListener opens one listener of this process.
func (s *Server) openListener(ctx context.Context, addr netip.AddrPort) (*net.TCPListener, error) {
	var control func(string, string, syscall.RawConn) error
	if addr.Addr().IsLoopback() {
		control = sockets.FreeBind
	}
	listener, err := listenOn(ctx, addr, control)
	if err == nil && s.config.Store != nil {
		s.config.Store(listener)
	}
	return listener, err
}

// passing reports whether a listener may be opened later with the same settings.
func passing(err error) bool { return !sockets.WrongAddr(err) }

// logMissing logs why listeners are missing.
func logMissing(log *slog.Logger, errs []error) {
	for _, err := range errs {
		log.Warn("degraded: connections to VIPs of one family are not carried; retrying", "error", err)
	}
}

// openMissing opens the missing listeners, and calls accept with each, until all are open or ctx ends.
func (s *Server) openMissing(ctx context.Context, accept func(*net.TCPListener)) {
	if len(s.unserved()) == 0 {
		return
	}
	sockets.Retry(ctx, func() (last error) {
		for addr := range s.unserved() {
			listener, err := s.openListener(ctx, addr)
			if err != nil {
				last = err
			}
			if s.opening(addr, listener, err) {
				s.log.Info("a missing listener for connections to VIPs is open now", "listener", addr)
				accept(listener)
				if s.config.Opened != nil {
					s.config.Opened(s.Addrs())
				}
			}
		}
		return last
	})
}

// opening records the result of opening a missing listener. It reports whether the listener is to be
// served.
func (s *Server) opening(addr netip.AddrPort, listener *net.TCPListener, err error) bool {
	s.listenersMu.Lock()
	defer s.listenersMu.Unlock()
	switch {
	case err != nil:
		s.missing[addr] = err
		return false
	case s.closed:
		_ = listener.Close() // no client has connected
		return false
	}
	delete(s.missing, addr)
	s.listeners = append(s.listeners, listener)
	return true
}

// unserved returns the missing listeners and why they are.
func (s *Server) unserved() map[netip.AddrPort]error {
	s.listenersMu.Lock()
	defer s.listenersMu.Unlock()
	return maps.Clone(s.missing)
}

// Unserved returns a text for each listener that cannot be opened at an address of this host, with the
// reason.
func (s *Server) Unserved() []string {
	var texts []string
	for _, err := range s.unserved() {
		if passing(err) {
			texts = append(texts, "connections to VIPs: "+err.Error())
		}
	}
	slices.Sort(texts)
	return texts
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
	config.KeepAlive = -1 // connections inherit the options of the socket
	config.Control = func(network, address string, conn syscall.RawConn) error {
		controlErr := conn.Control(inheritKeepAlive)
		if control == nil {
			return controlErr
		}
		return errors.Join(controlErr, control(network, address, conn))
	}
	listener, err := config.Listen(ctx, fmt.Sprintf("tcp%d", familyOf(addr.Addr())), addr.String())
	if err != nil {
		return nil, err
	}
	return listener.(*net.TCPListener), nil
}

// inheritKeepAlive sets the options of [keepAlive] on a listening socket.
func inheritKeepAlive(fd uintptr) {
	probes := keepAlive()
	for _, o := range [][3]int{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(probes.Idle.Seconds())},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(probes.Interval.Seconds())}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, probes.Count},
	} {
		_ = unix.SetsockoptInt(int(fd), o[0], o[1], o[2]) //nolint:gosec // a descriptor; without it, the idle timeout is left
	}
}

// opened returns the open listeners.
func (s *Server) opened() []*net.TCPListener {
	s.listenersMu.Lock()
	defer s.listenersMu.Unlock()
	return slices.Clone(s.listeners)
}

// Addrs returns the addresses that the server listens on.
func (s *Server) Addrs() []netip.AddrPort {
	opened := s.opened()
	addrs := make([]netip.AddrPort, 0, len(opened))
	for _, l := range opened {
		addrs = append(addrs, l.Addr().(*net.TCPAddr).AddrPort())
	}
	return addrs
}

// closeListeners closes the listeners. None is opened afterwards.
func (s *Server) closeListeners() {
	s.listenersMu.Lock()
	defer s.listenersMu.Unlock()
	s.closed = true
	for _, l := range s.listeners {
		_ = l.Close() // nothing is buffered
	}
}

// OpenSockets opens the sockets of addr, a [Config.Addr], for [Config.Sockets] of another process. It
// opens those of an address that this host does not have yet, too. It logs those that it cannot open,
// and fails if it can open none because the address is wrong. The caller closes the files.
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
	if len(files) == 0 && !slices.ContainsFunc(errs, passing) {
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

// Among reports whether a socket is one that a server would open for addr, a [Config.Addr].
func Among(addr string, file *os.File) bool {
	cfg := Config{Addr: addr}
	hosts, port, err := cfg.listenAddrs()
	bound := sockets.TCPAddr(file)
	return err == nil && port != 0 && bound.Port() == port && slices.Contains(hosts, bound.Addr())
}

// Owns reports whether a socket listens on the port of addr, a [Config.Addr], over TCP: it is one of
// [OpenSockets], or one that systemd holds for the same port.
func Owns(addr string, file *os.File) bool {
	cfg := Config{Addr: addr}
	_, port, err := cfg.listenAddrs()
	if err != nil {
		return false
	}
	return port != 0 && sockets.TCPAddr(file).Port() == port
}
