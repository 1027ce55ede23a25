package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// dial opens a connection, with TLS if the server is asked over TLS.
func (s *server) dial() (net.Conn, error) {
	client := s.client
	ctx, cancel := context.WithTimeout(client.context, client.latest.Load().Timeout)
	defer cancel()
	conn, err := client.dialTCP(ctx, &net.Dialer{Control: client.config.Control}, s.spec.Addr.String())
	if err != nil || !s.spec.TLS {
		return conn, err
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ClientSessionCache: client.tickets,
		ServerName: cmp.Or(s.spec.ServerName, s.spec.Addr.Addr().WithZone("").String()),
	}
	if path := client.latest.Load().TLSRootsFile; path != "" {
		config.RootCAs, err = ReadRoots(path)
	}
	secure := tls.Client(conn, config)
	if err == nil {
		err = secure.HandshakeContext(ctx)
	}
	if err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	return secure, nil
}

// unackedTimeout is how long the peer's kernel may leave sent data unacknowledged before this host's kernel ends the
// connection: by then a NAT has forgotten the flow, or the peer is gone. A server that is slow to answer acknowledges
// at once, so its connection stays. The timeout leaves time to retry over another connection.
const unackedTimeout = 2 * time.Second

// dialTCP opens a connection, and then sets unackedTimeout (tcp(7), TCP_USER_TIMEOUT).
func dialTCP(ctx context.Context, dialer *net.Dialer, addr string) (net.Conn, error) {
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	raw, err := conn.(*net.TCPConn).SyscallConn() //nolint:forcetypeassert // it was dialled as one
	if err == nil {
		err = raw.Control(func(fd uintptr) { // Linux has this option, so setting it does not fail
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unackedTimeout.Milliseconds()))
		})
	}
	if err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	return conn, nil
}

// ReadRoots reads a PEM file with certificates of certificate authorities.
func ReadRoots(path string) (roots *x509.CertPool, err error) {
	pem, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading root certificates: %w", err)
	}
	if roots = x509.NewCertPool(); !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading root certificates: %q has no certificate in PEM form", path)
	}
	return roots, nil
}
