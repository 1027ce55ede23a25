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

	// wantedLife is what Istio's agent asks for; the authority may give less, or refuse.
	wantedLife = 24 * time.Hour
)

// A keyPair is a certificate chain and its private key, both as PEM.
type keyPair struct{ chain, key []byte }

// parse returns the pair in the form that TLS wants, with Leaf set.
func (p keyPair) parse() (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(p.chain, p.key)
	if err != nil {
		return nil, err
	}
	return &pair, nil
}

// exchange has the certificate authority sign a certificate for a new key. The
// authority knows the workload by its token or by the certificate before.
func (w *workload) exchange(ctx context.Context) (keyPair, error) {
	request, key, err := certificateRequest(w.cfg)
	if err != nil {
		return keyPair{}, fmt.Errorf("making a certificate request: %w", err)
	}
	proof, err := readCredentials(w.cfg, w.proof(), w.cfg.caServerName())
	if err != nil {
		return keyPair{}, err
	}
	conn, err := dial(w.cfg, w.cfg.CAAddr, pingAfter, proof)
	if err != nil {
		return keyPair{}, err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	response, err := sign(ctx, conn, request, wantedLife)
	if status.Code(err) == codes.InvalidArgument {
		// istiod refuses a life beyond its MAX_WORKLOAD_CERT_TTL.
		response, err = sign(ctx, conn, request, 0)
	}
	switch {
	case status.Code(err) == codes.Unimplemented:
		return keyPair{}, errNoAuthority
	case err != nil:
		if proof.workload != nil && certificateRefused(err) {
			w.doubt(proof.workload, true)
		}
		return keyPair{}, fmt.Errorf("asking the certificate authority %s: %w", w.cfg.CAAddr, err)
	}
	chain := strings.Join(response.GetCertChain(), "\n")
	return keyPair{chain: []byte(chain), key: key}, nil
}

// sign asks for a certificate for so long, or, with 0, for as long as the authority likes.
func sign(ctx context.Context, conn *grpc.ClientConn, request []byte, life time.Duration) (*ca.IstioCertificateResponse, error) {
	response := &ca.IstioCertificateResponse{}
	err := conn.Invoke(ctx, createCertificate, &ca.IstioCertificateRequest{
		Csr: string(request), ValidityDuration: int64(life / time.Second),
	}, response)
	return response, err
}

// certificateRequest makes a key and a request for the identity of cfg, both PEM.
func certificateRequest(cfg Config) (request, key []byte, err error) {
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

// spiffePath is the node's SPIFFE identity without the trust domain.
func (n Node) spiffePath() string {
	account := n.ServiceAccount
	if account == "" {
		account = "default"
	}
	return "/ns/" + n.Namespace + "/sa/" + account
}

// check refuses a certificate that cannot prove the node's identity now.
func (n Node) check(leaf *x509.Certificate) error {
	if now := time.Now(); !now.Before(leaf.NotAfter) {
		return fmt.Errorf("the certificate has expired at %s", leaf.NotAfter.Format(time.RFC3339))
	}
	var identities []string
	for _, uri := range leaf.URIs {
		if uri.Scheme != "spiffe" {
			continue
		}
		if uri.Path == n.spiffePath() {
			return nil
		}
		identities = append(identities, uri.String())
	}
	if len(identities) == 0 {
		return errors.New("the certificate has no SPIFFE identity")
	}
	return fmt.Errorf("the certificate is for %s, and this node is %s: see --namespace and --service-account",
		strings.Join(identities, ", "), n.spiffePath())
}
