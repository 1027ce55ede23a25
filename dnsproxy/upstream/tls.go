package upstream

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// tlsConfig returns the configuration for a connection to a TLS server.
func (c *Client) tlsConfig(spec Spec) (*tls.Config, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: spec.ServerName, RootCAs: c.config.TLSRoots,
		ClientSessionCache: c.tickets,
	}
	if config.ServerName == "" {
		config.ServerName = spec.Addr.Addr().WithZone("").String()
	}
	if c.config.TLSRootsFile != "" {
		var err error
		if config.RootCAs, err = ReadRoots(c.config.TLSRootsFile); err != nil {
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
