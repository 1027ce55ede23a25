package egress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// connect returns a connection to a name, or to the endpoints of its destination: by their addresses, or
// through the proxy. The error is a refusal.
func (s *Server) connect(ctx context.Context, name wire.Name, to destination) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.DialTimeout)
	defer cancel()
	targets, err := to.targets(hostText(name))
	if err != nil {
		return nil, err
	}
	if s.config.Proxy == "" {
		return s.race(ctx, targets, false)
	}
	var errs []error
	for _, target := range targets {
		conn, err := s.connectByProxy(ctx, target)
		if err == nil {
			return conn, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// connectByProxy asks the proxy for a connection to a target.
func (s *Server) connectByProxy(ctx context.Context, target endpoint) (*net.TCPConn, error) {
	if target.name == "" {
		if f := s.allowed(target, []netip.Addr{target.addr}, false); f.err != nil {
			return nil, f.err
		}
	}
	proxy, err := parseEndpoint(s.config.Proxy)
	if err != nil {
		return nil, err
	}
	conn, err := s.race(ctx, []endpoint{proxy}, true) // only the operator chooses its addresses
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = requestTunnel(conn, target.String())
	if !stop() {
		err = errors.Join(err, ctx.Err())
	}
	if err != nil {
		reset(conn)
		return nil, refuse(ReasonConnect, "connecting to %s through the proxy %s (--egress-proxy): %w", target, s.config.Proxy, err)
	}
	return conn, nil
}

// maxProxyHead is the length in bytes of the longest response of a proxy.
const maxProxyHead = 16 << 10

// requestTunnel sends a CONNECT request and reads the response. It reads no byte after the head,
// which is the host's.
func requestTunnel(conn *net.TCPConn, target string) error {
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target); err != nil {
		return err
	}
	// One byte at a time keeps what follows in the socket.
	head := bufio.NewReaderSize(&oneByte{conn, maxProxyHead}, 16)
	response, err := http.ReadResponse(head, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return fmt.Errorf("reading the response: %w", err)
	}
	_ = response.Body.Close() // CONNECT's has none
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("the proxy answers %q", response.Status)
	}
	return nil
}

// A oneByte reads one byte at a time, and at most left of them.
type oneByte struct {
	from io.Reader
	left int
}

// Read reads one byte.
func (o *oneByte) Read(b []byte) (int, error) {
	if o.left == 0 {
		return 0, fmt.Errorf("the head is longer than %d bytes", maxProxyHead)
	}
	o.left--
	return o.from.Read(b[:min(len(b), 1)])
}
