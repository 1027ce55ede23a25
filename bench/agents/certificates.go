package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// serverName is the name in the certificate of the control planes.
const serverName = "nametap-discovery"

// certificates are the certificates of a run: an authority, which signs the certificates of control
// planes and of agents. All agents of a namespace share a certificate.
type certificates struct {
	authority *x509.Certificate
	key       *ecdsa.PrivateKey
	signed    int64 // how many certificates
	dir       string
	configs   func(namespace string) *tls.Config
}

// newCertificates makes an authority, and writes the files of control planes to dir.
func newCertificates(dir string, namespaces []string) (*certificates, error) {
	c := &certificates{dir: dir}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	root, err := c.sign(template)
	if err != nil {
		return nil, err
	}
	if c.authority, err = x509.ParseCertificate(root.Certificate[0]); err != nil {
		return nil, fmt.Errorf("reading the authority: %w", err)
	}
	c.key = root.PrivateKey.(*ecdsa.PrivateKey) //nolint:forcetypeassert // it was made so
	server, err := c.sign(&x509.Certificate{DNSNames: []string{serverName}})
	if err != nil {
		return nil, err
	}
	configs := map[string]*tls.Config{}
	for _, namespace := range namespaces {
		if configs[namespace], err = c.client(namespace); err != nil {
			return nil, err
		}
	}
	c.configs = func(namespace string) *tls.Config { return configs[namespace] }
	return c, c.write(server)
}

// client returns the configuration of agents of a namespace. As in nametap's agent, sessions are not resumed.
func (c *certificates) client(namespace string) (*tls.Config, error) {
	id := &url.URL{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/" + namespace + "/sa/default"}
	pair, err := c.sign(&x509.Certificate{URIs: []*url.URL{id}})
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(c.authority)
	return &tls.Config{
		ServerName: serverName, RootCAs: roots, Certificates: []tls.Certificate{pair},
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
	}, nil
}

// sign completes a certificate, makes a key for it and signs it; the first one signs itself.
func (c *certificates) sign(template *x509.Certificate) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making a key: %w", err)
	}
	c.signed++
	template.SerialNumber = big.NewInt(c.signed)
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	if !template.IsCA {
		template.KeyUsage = x509.KeyUsageDigitalSignature
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	parent, signer := c.authority, c.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("signing a certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// write writes the authority and the certificate of control planes.
func (c *certificates) write(server tls.Certificate) error {
	key, err := x509.MarshalPKCS8PrivateKey(server.PrivateKey)
	if err != nil {
		return fmt.Errorf("encoding a key: %w", err)
	}
	return errors.Join(
		writePEM(c.path("ca.crt"), "CERTIFICATE", c.authority.Raw),
		writePEM(c.path("tls.crt"), "CERTIFICATE", server.Certificate[0]),
		writePEM(c.path("tls.key"), "PRIVATE KEY", key),
	)
}

func (c *certificates) path(name string) string { return filepath.Join(c.dir, name) }

func writePEM(path, kind string, der []byte) error {
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		return fmt.Errorf("writing a certificate: %w", err)
	}
	return nil
}

// flags returns the flags of a control plane that serves on an address over TLS.
func (c *certificates) flags(address string) []string {
	return []string{
		"--grpc-addr=", "--tls-addr=" + address,
		"--tls-cert=" + c.path("tls.crt"), "--tls-key=" + c.path("tls.key"), "--tls-client-ca=" + c.path("ca.crt"),
	}
}
