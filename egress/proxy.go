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
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// connect returns a connection to a name, or to the endpoints of its destination: by their addresses, or
// through the proxy. The error is a refusal.
func (s *Server) connect(ctx context.Context, name wire.Name, to destination) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
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
	return nil, attemptErrors(errs)
}

// connectByProxy asks the proxy for a connection to a target.
func (s *Server) connectByProxy(ctx context.Context, target endpoint) (*net.TCPConn, error) {
	switch {
	case target.name == "":
		if err := s.forbids(ctx, netip.AddrPortFrom(target.addr, target.port)); err != nil {
			return nil, refuse(ReasonAddress, "the endpoint %s is refused: %w", target, err)
		}
	case endsInNumber(target.name):
		return nil, refuse(ReasonAddress, "%s is refused: it ends in a number, so the proxy would take it for an address", target.name)
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

// endsInNumber reports whether the last label of a hostname is a number, such as in 127.1, which many programs
// take for an address. No name of the DNS has such a label (RFC 3696, section 2).
func endsInNumber(name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	last := name[strings.LastIndexByte(name, '.')+1:]
	if hex, found := strings.CutPrefix(last, "0x"); found {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
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
	for {
		response, err := http.ReadResponse(head, &http.Request{Method: http.MethodConnect}) //nolint:bodyclose // it has none: see below
		if err != nil {
			return fmt.Errorf("reading the response: %w", err)
		}
		switch response.StatusCode / 100 {
		case 1: // it is followed by another one (RFC 9110, section 15.2)
		case 2: // what follows is the host's, also if the head has the length of a body (RFC 9110, section 9.3.6)
			return nil
		default: // whose body is not read
			return fmt.Errorf("the proxy answers %q", response.Status)
		}
	}
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
