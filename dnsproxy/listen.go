package dnsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// An Addr is where a listener is open.
type Addr struct {
	Network string `json:"network"` // "udp" or "tcp"
	Address string `json:"address"` // host:port
}

// String returns the network and the address, as logs show them.
func (a Addr) String() string { return a.Network + " " + a.Address }

// A listener serves one socket.
type listener interface {
	addr() Addr
	// serve reads the socket until stop, and returns when all that was read is
	// answered. An error means that it died.
	serve() error
	// stop may be called once, before or after serve.
	stop()
	// close closes a socket that serve was never called on.
	close()
}

// pacer returns what paces the attempts of a listener after errors that pass.
func (h *handler) pacer(listener Addr) *sockets.Pacer {
	return &sockets.Pacer{Log: h.log, Listener: listener.String(), Count: h.metrics.listenerErrors.Inc}
}

// portAttempts is how many free ports are tried until one is free for UDP and
// TCP alike.
const portAttempts = 10

// A missingListener is one that could not be opened.
type missingListener struct {
	network, host, port string
	err                 error // why
}

// listen opens UDP and TCP on every address that the configuration means, all on
// one port. What cannot be opened is logged and returned as long as something can.
func (s *Server) listen(ctx context.Context) ([]listener, []missingListener, error) {
	hosts, port, err := splitAddr(s.config.Addr)
	if err != nil {
		return nil, nil, err
	}
	if len(s.config.Sockets) > 0 {
		return s.adoptAndOpen(ctx, hosts, port)
	}
	listeners, missing, err := s.openAll(ctx, hosts, port)
	for range portAttempts {
		if port != "" || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		for _, l := range listeners {
			l.close()
		}
		listeners, missing, err = s.openAll(ctx, hosts, port)
	}
	if len(listeners) == 0 {
		return nil, nil, fmt.Errorf("no DNS listener can be opened on %s: %w", s.config.Addr, err)
	}
	s.sayMissing(missing)
	return listeners, missing, nil
}

// sayMissing logs which listeners could not be opened.
func (s *Server) sayMissing(missing []missingListener) {
	for _, m := range missing {
		s.log.Warn("degraded: a DNS listener cannot be opened and is tried again", "error", m.err)
	}
}

// adoptAndOpen serves the sockets that were handed over, and opens the others if that is
// wanted: a port that was taken when they were opened may be free by now.
func (s *Server) adoptAndOpen(ctx context.Context, hosts []string, port string) ([]listener, []missingListener, error) {
	listeners, err := s.adopt(port)
	if err != nil || !s.config.OpenOthers {
		return listeners, nil, err
	}
	var missing []missingListener
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			wanted := Addr{Network: network, Address: net.JoinHostPort(host, port)}
			if slices.ContainsFunc(listeners, func(l listener) bool { return l.addr() == wanted }) {
				continue
			}
			l, err := s.open(ctx, network, host, port)
			if err != nil {
				missing = append(missing, missingListener{network: network, host: host, port: port, err: err})
				continue
			}
			listeners = append(listeners, l)
		}
	}
	s.sayMissing(missing)
	return listeners, missing, nil
}

// reopenInterval is how often it is tried to open what could not be opened.
const reopenInterval = time.Second

// openMissing opens listeners that could not be opened before, such as those of a family
// that the host gets later, until it has all or ctx ends.
func (s *Server) openMissing(ctx context.Context, group *errgroup.Group, missing []missingListener) {
	ticker := time.NewTicker(reopenInterval)
	defer ticker.Stop()
	for len(missing) > 0 {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		missing = slices.DeleteFunc(missing, func(m missingListener) bool {
			l, err := s.open(ctx, m.network, m.host, m.port)
			if err == nil {
				s.addListener(group, l)
			}
			return err == nil
		})
	}
}

// addListener serves a listener in group, unless the server has stopped.
func (s *Server) addListener(group *errgroup.Group, l listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		l.close()
		return
	}
	s.listeners = append(s.listeners, l)
	slices.SortStableFunc(s.listeners, func(a, b listener) int { return cmp.Compare(order(a.addr()), order(b.addr())) })
	s.handler.metrics.listeners.Set(float64(len(s.listeners)))
	s.log.Info("a DNS listener that could not be opened before is open", "listener", l.addr())
	group.Go(l.serve)
}

// order is the place of a listener among others: IPv4 before IPv6 and UDP before TCP.
func order(a Addr) int {
	place := 0
	if addr, err := netip.ParseAddrPort(a.Address); err == nil && !addr.Addr().Is4() {
		place = 2
	}
	if a.Network == "tcp" {
		place++
	}
	return place
}

// splitAddr returns the IP addresses and the port of a [Config.Addr]; the port
// is empty for a free one.
func splitAddr(addr string) (hosts []string, port string, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, "", fmt.Errorf("DNS address %q: want host:port: %w", addr, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		return nil, "", fmt.Errorf("DNS address %q: want a port from 0 to 65535", addr)
	} else if n == 0 {
		port = ""
	}
	switch {
	case host == "localhost":
		return []string{"127.0.0.1", "::1"}, port, nil
	case host == "":
		return []string{"0.0.0.0", "::"}, port, nil
	case net.ParseIP(host) == nil:
		return nil, "", fmt.Errorf("DNS address %q: want an IP address, localhost or nothing before the port", addr)
	}
	return []string{host}, port, nil
}

// openAll opens UDP and TCP on every host and returns what it could open, what it could
// not, and the errors of that.
func (s *Server) openAll(ctx context.Context, hosts []string, port string) (listeners []listener, missing []missingListener, err error) {
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			l, openErr := s.open(ctx, network, host, port)
			if openErr != nil {
				missing = append(missing, missingListener{network: network, host: host, err: openErr})
				err = errors.Join(err, openErr)
				continue
			}
			listeners = append(listeners, l)
			if port == "" { // the others follow the first one's free port
				_, port, _ = net.SplitHostPort(l.addr().Address) // never fails on a net.Addr's text
			}
		}
	}
	for i := range missing {
		missing[i].port = port
	}
	return listeners, missing, err
}

// open opens one socket; an empty port takes a free one.
func (s *Server) open(ctx context.Context, network, host, port string) (listener, error) {
	if port == "" {
		port = "0"
	}
	family := familyOf(host)
	address := net.JoinHostPort(host, port)
	if network == "udp" {
		return listenUDP(ctx, &s.handler, network+family, address)
	}
	// Connections that are idle are closed long before the kernel would ask.
	config := net.ListenConfig{KeepAlive: -1}
	opened, err := config.Listen(ctx, network+family, address)
	if err != nil {
		return nil, err
	}
	return s.tcpListener(opened)
}

// tcpListener serves an open socket, or closes it.
func (s *Server) tcpListener(opened net.Listener) (listener, error) {
	tcp, ok := opened.(*net.TCPListener)
	if !ok {
		_ = opened.Close() // nobody has connected
		return nil, fmt.Errorf("listening on %s %s: %T is no TCP socket", opened.Addr().Network(), opened.Addr(), opened)
	}
	return newTCPListener(&s.handler, tcp, s.clients), nil
}

// OpenSockets opens UDP and TCP sockets on every address that addr, a [Config.Addr],
// means, for [Config.Sockets] of this or another process. Those of localhost are opened
// also for a family that is switched off, and serve when it comes back. What cannot be
// opened is logged as long as a UDP socket can. The caller closes the files.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) (files []*os.File, err error) {
	hosts, port, err := splitAddr(addr)
	if err != nil {
		return nil, err
	}
	if port == "" {
		return nil, fmt.Errorf("DNS address %q: want a port other than 0 for sockets that are handed over", addr)
	}
	config := net.ListenConfig{KeepAlive: -1}
	if len(hosts) > 1 {
		config.Control = bindBeforehand
	}
	var errs []error
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			file, err := openSocket(ctx, config, network+familyOf(host), net.JoinHostPort(host, port))
			if err != nil {
				errs = append(errs, err)
				continue
			}
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no DNS listener can be opened on %s: %w", addr, errors.Join(errs...))
	}
	for _, err := range errs {
		log.Warn("degraded: a DNS listener cannot be opened", "error", err)
	}
	return files, nil
}

// bindBeforehand has a socket bound to an address that the host does not have yet.
func bindBeforehand(_, _ string, conn syscall.RawConn) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
	})
	return errors.Join(controlErr, err)
}

// openSocket opens one socket and returns it as a file.
func openSocket(ctx context.Context, config net.ListenConfig, network, address string) (*os.File, error) {
	var socket interface {
		File() (*os.File, error)
		Close() error
	}
	if strings.HasPrefix(network, "udp") {
		conn, err := config.ListenPacket(ctx, network, address)
		if err != nil {
			return nil, err
		}
		socket = conn.(*net.UDPConn)
	} else {
		listener, err := config.Listen(ctx, network, address)
		if err != nil {
			return nil, err
		}
		socket = listener.(*net.TCPListener)
	}
	defer func() { _ = socket.Close() }() // the file is a duplicate
	return socket.File()
}

// familyOf is how the net package names the family of an IP address.
func familyOf(host string) string {
	if net.ParseIP(host).To4() != nil {
		return "4"
	}
	return "6"
}

// adopt serves the sockets that were handed over, all of which must be on the port of
// [Config.Addr].
func (s *Server) adopt(port string) (listeners []listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range listeners {
				l.close()
			}
		}
	}()
	for _, file := range s.config.Sockets {
		l, err := s.adoptOne(file)
		if err != nil {
			return listeners, fmt.Errorf("DNS socket %s, which was handed over: want a UDP or a listening TCP socket: %w", file.Name(), err)
		}
		listeners = append(listeners, l)
		if _, have, _ := net.SplitHostPort(l.addr().Address); port != "" && have != port {
			return listeners, fmt.Errorf("DNS socket %s, which was handed over, is on %s: want the port of %s", file.Name(), l.addr(), s.config.Addr)
		}
	}
	return listeners, nil
}

// adoptOne serves one socket, and closes the file.
func (s *Server) adoptOne(file *os.File) (listener, error) {
	defer func() { _ = file.Close() }() // it is duplicated
	if conn, err := net.FilePacketConn(file); err == nil {
		return adoptUDP(&s.handler, conn)
	}
	opened, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return s.tcpListener(opened)
}
