package fakedns

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"time"
)

// StartTLS is like Start for a server that speaks TLS over TCP and refuses UDP (RFC 7858).
// Its certificate is self-signed, and for name only. authority is this certificate in PEM.
func StartTLS(tb TB, handler Handler, name string, options ...Option) (s *Server, authority []byte) {
	tb.Helper()
	certificate, err := selfSigned(name)
	if err != nil {
		tb.Fatal(fmt.Errorf("making a certificate for %q: %w", name, err))
	}
	encrypted := func(s *Server) {
		s.noUDP = true
		s.tls = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	}
	s = Start(tb, handler, append(options, encrypted)...)
	return s, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]})
}

// selfSigned makes a certificate that is valid for an hour.
func selfSigned(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		DNSNames:     []string{name},
		NotBefore:    now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		IsCA:     true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
