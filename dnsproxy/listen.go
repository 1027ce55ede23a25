package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"

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

// listen opens UDP and TCP on every address that the configuration means, all on
// one port. What cannot be opened is logged as long as something can.
func (s *Server) listen(ctx context.Context) ([]listener, error) {
	hosts, port, err := splitAddr(s.config.Addr)
	if err != nil {
		return nil, err
	}
	if len(s.config.Sockets) > 0 {
		return s.adopt(port)
	}
	listeners, errs := s.openAll(ctx, hosts, port)
	for range portAttempts {
		if port != "" || !errors.Is(errors.Join(errs...), syscall.EADDRINUSE) {
			break
		}
		for _, l := range listeners {
			l.close()
		}
		listeners, errs = s.openAll(ctx, hosts, port)
	}
	if len(listeners) == 0 {
		return nil, fmt.Errorf("no DNS listener can be opened on %s: %w", s.config.Addr, errors.Join(errs...))
	}
	for _, err := range errs {
		s.log.Warn("degraded: a DNS listener cannot be opened", "error", err)
	}
	return listeners, nil
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

// openAll opens UDP and TCP on every host and returns what it could open, and
// why it could not open the rest.
func (s *Server) openAll(ctx context.Context, hosts []string, port string) (listeners []listener, errs []error) {
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			l, err := s.open(ctx, network, host, port)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			listeners = append(listeners, l)
			if port == "" { // the others follow the first one's free port
				_, port, _ = net.SplitHostPort(l.addr().Address) // never fails on a net.Addr's text
			}
		}
	}
	return listeners, errs
}

// open opens one socket; an empty port takes a free one.
func (s *Server) open(ctx context.Context, network, host, port string) (listener, error) {
	if port == "" {
		port = "0"
	}
	family := "6"
	if net.ParseIP(host).To4() != nil {
		family = "4"
	}
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
