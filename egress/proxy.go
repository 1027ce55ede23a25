package egress

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// connect connects to one of targets, directly or through the proxy. It suspends the task t while it waits. The
// error contains a refusal.
func (d *dialer) connect(t *task, targets []endpoint) (conn *socket, to netip.AddrPort, err error) {
	deadline := t.now.Add(connectTimeout)
	if d.config.Proxy == "" {
		return d.dial(t, targets, false, deadline)
	}
	var errs []error
	for _, target := range targets {
		conn, to, err = d.connectByProxy(t, target, deadline)
		if err == nil {
			return conn, to, nil
		}
		if endErr := t.endError(); endErr != nil { // the task has to end, and err is only a consequence
			return nil, to, endErr
		}
		if errs = append(errs, err); !t.now.Before(deadline) {
			break
		}
	}
	return nil, to, attemptErrors(errs)
}

// connectByProxy asks the proxy for a connection to a target.
func (d *dialer) connectByProxy(t *task, target endpoint, deadline time.Time) (conn *socket, to netip.AddrPort, err error) {
	if err := d.checkForProxy(t, target); err != nil {
		return nil, to, err
	}
	proxy, err := parseEndpoint(d.config.Proxy)
	if err != nil {
		return nil, to, err
	}
	conn, to, err = d.dial(t, []endpoint{proxy}, true, deadline) // the operator chose the proxy, so all its addresses are allowed
	if err != nil {
		return nil, to, err
	}
	if err := requestTunnel(&taskStream{t, conn, deadline}, target.String()); err != nil {
		t.reset(conn)
		return nil, to, refuse(ReasonConnect, "connecting to %s through the proxy %s (--egress-proxy): %w", target, d.config.Proxy, err)
	}
	return conn, to, nil
}

// checkForProxy returns a refusal if the proxy must not connect to a target.
func (d *dialer) checkForProxy(t *task, target endpoint) error {
	if target.name != "" {
		if endsInNumber(target.name) {
			return refuse(ReasonAddress, "%s is refused: it ends in a number, so the proxy would take it for an address", target.name)
		}
		return nil
	}
	if err := d.allow(t, netip.AddrPortFrom(target.addr, target.port)); err != nil {
		return refuse(ReasonAddress, "the endpoint %s is refused: %w", target, err)
	}
	return nil
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
	// The reader takes one byte at a time from conn, so what follows the head stays in the socket.
	head := bufio.NewReaderSize(&oneByte{conn, maxProxyHead}, 16)
	for {
		response, err := http.ReadResponse(head, &http.Request{Method: http.MethodConnect}) //nolint:bodyclose // it has none: see below
		if err != nil {
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

// A oneByte reads one byte at a time. The field left is how many bytes it may still read.
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
