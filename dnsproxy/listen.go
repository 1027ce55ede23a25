package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
)

// Times of a client's TCP connection.
const (
	tcpIdleTimeout  = 10 * time.Second // between two queries, RFC 7766, section 6.2.3
	tcpWriteTimeout = 10 * time.Second // in which a client must take an answer
)

// maxUDPQuery is the longest query that is read over UDP, in bytes. Queries with
// options and padding stay below; longer ones are cut by the kernel and FORMERR.
const maxUDPQuery = 4096

// headerLen is the length of a DNS message's header (RFC 1035, section 4.1.1).
const headerLen = 12

// An Addr is where a listener is open.
type Addr struct {
	Network string `json:"network"` // "udp" or "tcp"
	Address string `json:"address"` // host:port
}

// String returns the network and the address, as logs show them.
func (a Addr) String() string { return a.Network + " " + a.Address }

// A listener serves one socket.
type listener struct {
	addr    Addr
	server  *dns.Server
	started chan struct{} // closed when the socket is being read
	done    chan struct{} // closed when it is no more
}

// portAttempts is how many free ports are tried until one is free for UDP and
// TCP alike.
const portAttempts = 10

// listen opens UDP and TCP on every address that the configuration means, all on
// one port. What cannot be opened is logged as long as something can.
func (s *Server) listen(ctx context.Context) ([]*listener, error) {
	hosts, port, err := splitAddr(s.config.Addr)
	if err != nil {
		return nil, err
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
func (s *Server) openAll(ctx context.Context, hosts []string, port string) (listeners []*listener, errs []error) {
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			l, err := s.open(ctx, network, host, port)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			listeners = append(listeners, l)
			if port == "" { // the others follow the first one's free port
				_, port, _ = net.SplitHostPort(l.addr.Address) // never fails on a net.Addr's text
			}
		}
	}
	return listeners, errs
}

// open opens one socket; an empty port takes a free one.
func (s *Server) open(ctx context.Context, network, host, port string) (*listener, error) {
	if port == "" {
		port = "0"
	}
	l := &listener{started: make(chan struct{}), done: make(chan struct{})}
	l.server = &dns.Server{
		Handler:           &s.handler,
		ReadTimeout:       tcpIdleTimeout, // for the first query on a connection
		IdleTimeout:       func() time.Duration { return tcpIdleTimeout },
		MaxTCPQueries:     -1, // no bound
		MsgAcceptFunc:     s.accept,
		MsgInvalidFunc:    s.invalid,
		UDPSize:           maxUDPQuery,
		NotifyStartedFunc: func() { close(l.started) },
	}
	family := "6"
	if net.ParseIP(host).To4() != nil {
		family = "4"
	}
	var config net.ListenConfig
	address := net.JoinHostPort(host, port)
	if network == "udp" {
		conn, err := config.ListenPacket(ctx, "udp"+family, address)
		if err != nil {
			return nil, err
		}
		l.server.PacketConn = conn
		l.addr = Addr{Network: network, Address: conn.LocalAddr().String()}
		return l, nil
	}
	tcp, err := config.Listen(ctx, "tcp"+family, address)
	if err != nil {
		return nil, err
	}
	l.server.Listener = netutil.LimitListener(slowListener{tcp}, s.config.MaxTCPConns)
	l.addr = Addr{Network: network, Address: tcp.Addr().String()}
	return l, nil
}

// A slowListener's connections cut a client off that does not take what it
// asked for within tcpWriteTimeout. dns.Server has a WriteTimeout for that, which
// v1.1.73 does not look at.
type slowListener struct{ net.Listener }

// Accept implements [net.Listener].
func (l slowListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return slowConn{conn}, nil
}

type slowConn struct{ net.Conn }

// Write implements [net.Conn]. It closes the connection on an error: after half
// an answer the client could make nothing of another.
func (c slowConn) Write(b []byte) (int, error) {
	err := c.SetWriteDeadline(time.Now().Add(tcpWriteTimeout))
	if err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	if err != nil {
		_ = c.Close() // the error that matters is the write's
	}
	return n, err
}

// accept looks at a packet's header before it is parsed: what is no query is
// dropped, for nothing good comes of answering an answer. All else is for
// [handler.decide].
func (s *Server) accept(header dns.Header) dns.MsgAcceptAction {
	const responseBit = 1 << 15
	if header.Bits&responseBit != 0 {
		s.handler.metrics.dropped.Inc()
		return dns.MsgIgnore
	}
	return dns.MsgAccept
}

// invalid counts packets that the server drops for want of a header. A packet
// with a header that cannot be parsed gets FORMERR from the server.
func (s *Server) invalid(packet []byte, _ error) {
	if len(packet) < headerLen {
		s.handler.metrics.dropped.Inc()
	}
}

// close closes a socket that was never read.
func (l *listener) close() {
	// Nothing was sent or accepted, so nothing can be lost.
	if l.server.PacketConn != nil {
		_ = l.server.PacketConn.Close()
		return
	}
	_ = l.server.Listener.Close()
}

// serve reads the socket until shutdown.
func (l *listener) serve() error {
	defer close(l.done)
	if err := l.server.ActivateAndServe(); err != nil {
		return fmt.Errorf("the DNS listener on %s %s died: %w", l.addr.Network, l.addr.Address, err)
	}
	return nil
}

// awaitStart waits until the socket is being read or has died.
func (l *listener) awaitStart() {
	select {
	case <-l.started:
	case <-l.done:
	}
}

// shutdown closes the socket after the queries in flight are answered.
func (l *listener) shutdown(ctx context.Context) error {
	l.awaitStart() // the server cannot be stopped before it has started
	if err := l.server.ShutdownContext(ctx); err != nil {
		return fmt.Errorf("closing the DNS listener on %s %s: %w", l.addr.Network, l.addr.Address, err)
	}
	return nil
}
