package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
)

// dial opens a connection, with TLS if the server is asked over TLS.
func (s *server) dial() (net.Conn, error) {
	client := s.client
	ctx, cancel := context.WithTimeout(client.context, client.latest.Load().Timeout)
	defer cancel()
	conn, err := client.dialTCP(ctx, "tcp", s.spec.Addr.String())
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
