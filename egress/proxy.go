package egress

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// connect connects to one of targets, directly or through the proxy, which judges what a name leads to, until ctx ends. The
// error contains a refusal. A connection that may lead anywhere is direct.
func (d *dialer) connect(ctx context.Context, targets []endpoint, within reach) (conn *net.TCPConn, to netip.AddrPort, err error) {
	if d.config.Proxy == "" || within == anywhere {
		return d.dial(ctx, targets, func(to netip.AddrPort) error { return d.fence.forbids(ctx, to, within) })
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var errs []error
	for _, target := range targets {
		if conn, to, err = d.connectByProxy(ctx, target); err == nil {
			return conn, to, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return nil, to, joined(errs)
}

// connectByProxy asks the proxy for a connection to a target. The operator chose the proxy, so all its addresses are allowed.
func (d *dialer) connectByProxy(ctx context.Context, target endpoint) (*net.TCPConn, netip.AddrPort, error) {
	if _, err := wire.ParseHostname(target.name); target.name != "" && (err != nil || endsInNumber(target.name)) {
		return nil, netip.AddrPort{}, refuse(ReasonAddress, "%s is refused: it is no hostname or ends in a number, so the proxy could take it for something else", target.name)
	} else if target.name == "" {
		if err := d.fence.forbids(ctx, netip.AddrPortFrom(target.addr, target.port), normally); err != nil {
			return nil, netip.AddrPort{}, refuse(ReasonAddress, "the endpoint %s is refused: %w", target, err)
		}
	}
	conn, to, err := d.dial(ctx, []endpoint{parseEndpoint(d.config.Proxy)}, func(netip.AddrPort) error { return nil })
	if err != nil {
		return nil, to, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if err := requestTunnel(conn, target.String()); !stop() || err != nil {
		reset(conn)
		return nil, to, refuse(ReasonConnect, "connecting to %s through the proxy %s (--egress-proxy): %w", target, d.config.Proxy, cmp.Or(err, ctx.Err()))
	}
	return conn, to, nil
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

// maxProxyHead is how many bytes of a proxy's response are read at most.
const maxProxyHead = 16 << 10

// requestTunnel sends a CONNECT request and reads the response. It reads no byte after the head of the response:
// these bytes are the host's.
func requestTunnel(conn io.ReadWriter, target string) error {
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target); err != nil {
		return err
	}
	limited := &io.LimitedReader{R: oneByte{conn}, N: maxProxyHead}
	head := bufio.NewReader(limited)
	for {
		response, err := http.ReadResponse(head, &http.Request{Method: http.MethodConnect}) //nolint:bodyclose // it has none: see below
		switch {
		case limited.N == 0:
			return fmt.Errorf("the head of its response is longer than %d bytes", maxProxyHead)
		case err != nil:
			return fmt.Errorf("reading the response: %w", err)
		}
		switch response.StatusCode / 100 {
		case 1: // another response follows (RFC 9110, section 15.2)
		case 2: // the host's data follows, even if the head has the length of a body (RFC 9110, section 9.3.6)
			return nil
		default: // the body is not read
			return fmt.Errorf("the proxy answers %q", response.Status)
		}
	}
}

// A oneByte reads one byte at a time, so what follows the head of a response stays in the socket.
type oneByte struct{ io.Reader }

// Read reads one byte.
func (o oneByte) Read(b []byte) (int, error) { return o.Reader.Read(b[:min(len(b), 1)]) }
