package nds

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/api/ca"
)

const (
	createCertificate = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

	// wantedLife is the life that the client requests, the same as Istio's agent. The certificate authority may
	// issue a certificate with a shorter life, or refuse.
	wantedLife = 24 * time.Hour
)

// errNoAuthority is the error if the control plane does not implement the service of a certificate authority.
var errNoAuthority = errors.New("the control plane has no certificate authority")

// requestCertificate makes a key, and requests a certificate for it from the certificate authority. It returns the key,
// the certificate and its chain, in PEM. The client authenticates with the token, with certificate, or with both.
// certificate may be nil.
func requestCertificate(ctx context.Context, cfg Config, certificate *tls.Certificate) ([]byte, error) {
	request, key, err := newRequest(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a certificate request: %w", err)
	}
	creds, err := readCredentials(cfg, certificate, cfg.caServerName())
	if err != nil {
		return nil, err
	}
	conn, err := dial(ctx, cfg, cfg.CAAddr, creds.options...)
	if err != nil {
		return nil, err
	}
	defer conn.close()
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	response, err := sign(ctx, conn.ClientConn, request, wantedLife)
	if status.Code(err) == codes.InvalidArgument {
		// istiod refuses a life that is longer than its MAX_WORKLOAD_CERT_TTL.
		response, err = sign(ctx, conn.ClientConn, request, 0)
	}
	switch {
	case status.Code(err) == codes.Unimplemented:
		return nil, errNoAuthority
	case err != nil && creds.outdated != nil:
		return nil, creds.outdated
	case err != nil:
		return nil, fmt.Errorf("requesting a certificate from %s: %w", cfg.CAAddr, shorten(conn.explain(err)))
	}
	return append(key, strings.Join(response.GetCertChain(), "\n")...), nil
}

// sign requests a certificate that is valid for the duration life. If life is 0, the authority chooses the
// duration.
func sign(ctx context.Context, conn *grpc.ClientConn, request []byte, life time.Duration) (*ca.IstioCertificateResponse, error) {
	response := &ca.IstioCertificateResponse{}
	err := conn.Invoke(ctx, createCertificate, &ca.IstioCertificateRequest{
		Csr: string(request), ValidityDuration: int64(life / time.Second),
	}, response)
	return response, err
}

// newRequest makes a key and a certificate request for the node's identity, both in PEM.
func newRequest(cfg Config) (request, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	identity := &url.URL{Scheme: "spiffe", Host: cfg.TrustDomain, Path: cfg.Node.spiffePath()}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{identity}}, private)
	if err != nil {
		return nil, nil, err
	}
	request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	der, err = x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return request, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}
