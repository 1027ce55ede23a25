package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// unackedTimeout is how long the peer's kernel may leave sent data unacknowledged until this
// one ends the connection: a NAT has forgotten the flow, or the peer is gone. A server that is
// slow to answer acknowledges at once, so this tells the two apart, and leaves time to ask
// again over another connection.
const unackedTimeout = 2 * time.Second

// dial opens a connection, with TLS if the server is asked over TLS.
func (s *server) dial() (net.Conn, error) {
	client := s.client
	ctx, cancel := context.WithTimeout(client.context, client.latest.Load().Timeout)
	defer cancel()
	dialer := net.Dialer{Control: client.config.Control}
	conn, err := dialer.DialContext(ctx, "tcp", s.spec.Addr.String())
	if err != nil {
		return nil, err
	}
	if err := limitUnacked(conn); err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	if !s.spec.TLS {
		return conn, nil
	}
	config, err := client.tlsConfig(s.spec)
	if err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	return secure, nil
}

// limitUnacked sets unackedTimeout (tcp(7), TCP_USER_TIMEOUT).
func limitUnacked(conn net.Conn) error {
	raw, err := conn.(*net.TCPConn).SyscallConn() //nolint:forcetypeassert // it was dialled as one
	if err != nil {
		return err
	}
	controlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unackedTimeout.Milliseconds()))
	})
	return errors.Join(controlErr, err)
}

// tlsConfig returns the configuration for a connection to a TLS server.
func (c *Client) tlsConfig(spec Spec) (*tls.Config, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: spec.ServerName, RootCAs: c.config.TLSRoots,
		ClientSessionCache: c.tickets,
	}
	if config.ServerName == "" {
		config.ServerName = spec.Addr.Addr().WithZone("").String()
	}
	if path := c.latest.Load().TLSRootsFile; path != "" {
		var err error
		if config.RootCAs, err = ReadRoots(path); err != nil {
			return nil, err
		}
	}
	return config, nil
}

// ReadRoots reads a PEM file with certificates of certificate authorities.
func ReadRoots(path string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading root certificates: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading root certificates: %q has no certificate in PEM form", path)
	}
	return roots, nil
}
