package fakexds

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/api/ca"
)

// An Authority is a certificate authority like istiod's: it issues the server's
// certificate and signs the certificates of workloads. Its methods are safe for concurrent
// use.
type Authority struct {
	tb        testing.TB
	root      *x509.Certificate
	key       crypto.Signer
	server    *tls.Config
	serverPEM [2]string // the server's certificate and key, in PEM

	mu       sync.Mutex
	serial   int64
	life     time.Duration
	identity string
	signings []Signing
	changed  chan struct{}
	change   func(*tls.Config) error
	longest  time.Duration
	backdate time.Duration
}

// A Signing is a certificate that was signed on request.
type Signing struct {
	// Asked is the identity in the request, and Proof how the workload authenticated:
	// "token" or "certificate".
	Asked, Proof string
}

// SelfSigned returns a certificate with a serial number that is valid between two times from now, and its key, in PEM.
func SelfSigned(tb testing.TB, serial int64, from, to time.Duration) (certificate, key string) {
	tb.Helper()
	private := newKey(tb)
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(from), NotAfter: time.Now().Add(to)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		tb.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		tb.Fatal(err)
	}
	return pemOf("CERTIFICATE", der), pemOf("PRIVATE KEY", text)
}

// NewAuthority returns an authority with a server certificate for name. The certificates
// that it signs live for 24 h and have the given identity, whatever the request says.
// istiod's certificates are for the service account of the token.
func NewAuthority(tb testing.TB, name, identity string) *Authority {
	tb.Helper()
	a := &Authority{tb: tb, life: 24 * time.Hour, backdate: time.Second, identity: identity, changed: make(chan struct{})}
	a.key = newKey(tb)
	a.root = a.sign(tb, &x509.Certificate{
		Subject: pkix.Name{CommonName: "root"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, a.key.Public())
	key := newKey(tb)
	leaf := a.sign(tb, &x509.Certificate{DNSNames: []string{name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, key.Public())
	pool := x509.NewCertPool()
	pool.AddCert(a.root)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	a.serverPEM = [2]string{pemOf("CERTIFICATE", leaf.Raw), pemOf("PRIVATE KEY", der)}
	a.server = &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw}, PrivateKey: key}},
		ClientAuth:   tls.VerifyClientCertIfGiven, ClientCAs: pool,
	}
	a.server.GetConfigForClient = a.handshake
	return a
}

// SetHandshake makes the server call the function change before every handshake, with a
// copy of the server's settings. The handshake uses the copy, which change may modify. If
// change returns an error, the client gets the alert "internal error". If change is nil,
// handshakes use the server's settings.
func (a *Authority) SetHandshake(change func(*tls.Config) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.change = change
}

// handshake returns the settings for one handshake; nil means the server's.
func (a *Authority) handshake(*tls.ClientHelloInfo) (*tls.Config, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.change == nil {
		return nil, nil //nolint:nilnil // as crypto/tls defines it
	}
	config := a.server.Clone()
	return config, a.change(config)
}

func newKey(tb testing.TB) crypto.Signer {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

// sign completes and signs a template. The first one, the root, is self-signed.
func (a *Authority) sign(tb testing.TB, template *x509.Certificate, public crypto.PublicKey) *x509.Certificate {
	tb.Helper()
	a.mu.Lock()
	a.serial++
	template.SerialNumber = big.NewInt(a.serial)
	template.NotBefore, template.NotAfter = time.Now().Add(-a.backdate), time.Now().Add(a.life)
	a.mu.Unlock()
	parent := a.root
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, a.key)
	if err != nil {
		tb.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return certificate
}

// Root returns the root certificate in PEM.
func (a *Authority) Root() string { return pemOf("CERTIFICATE", a.root.Raw) }

// Server returns the server's certificate and its key, in PEM.
func (a *Authority) Server() (certificate, key string) { return a.serverPEM[0], a.serverPEM[1] }

// Client returns a client certificate for the authority's identity, and its key, in PEM.
func (a *Authority) Client() (certificate, key string) {
	a.tb.Helper()
	private := newKey(a.tb)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		a.tb.Fatal(err)
	}
	return pemOf("CERTIFICATE", a.workload(private.Public()).Raw), pemOf("PRIVATE KEY", der)
}

// workload signs a certificate for a workload.
func (a *Authority) workload(public crypto.PublicKey) *x509.Certificate {
	a.mu.Lock()
	identity := a.identity
	a.mu.Unlock()
	uri, err := url.Parse(identity)
	if err != nil {
		a.tb.Fatal(err)
	}
	return a.sign(a.tb, &x509.Certificate{
		URIs: []*url.URL{uri}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, public)
}

// SetLife sets the life of certificates that are signed from now on.
func (a *Authority) SetLife(life time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.life = life
}

// SetBackdate sets how far certificates are backdated: a certificate is valid from the time of its signing minus
// backdate. istiod uses 2 minutes, because clocks differ.
func (a *Authority) SetBackdate(backdate time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.backdate = backdate
}

// SetLongest makes the authority refuse requests for a life that is longer than longest,
// as istiod does. A request without a life is not refused.
func (a *Authority) SetLongest(longest time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.longest = longest
}

// WaitSigned waits until n certificates were signed on request and returns the n-th.
func (a *Authority) WaitSigned(ctx context.Context, n int) (Signing, error) {
	for {
		a.mu.Lock()
		signings, changed := a.signings, a.changed
		a.mu.Unlock()
		if len(signings) >= n {
			return signings[n-1], nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Signing{}, fmt.Errorf("fakexds: %d certificates signed, want %d: %w", len(signings), n, ctx.Err())
		}
	}
}

// register adds the service that signs certificates to a gRPC server.
func (a *Authority) register(registrar *grpc.Server, s *Server) {
	registrar.RegisterService(&grpc.ServiceDesc{
		ServiceName: "istio.v1.auth.IstioCertificateService",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "CreateCertificate",
			Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				request := &ca.IstioCertificateRequest{}
				if err := decode(request); err != nil {
					return nil, err
				}
				proof, err := s.authenticate(ctx)
				if err != nil {
					return nil, err
				}
				return a.create(request, proof)
			},
		}},
	}, a)
}

// create signs the certificate that a workload requests.
func (a *Authority) create(request *ca.IstioCertificateRequest, proof string) (*ca.IstioCertificateResponse, error) {
	block, _ := pem.Decode([]byte(request.GetCsr()))
	if block == nil {
		return nil, status.Error(codes.InvalidArgument, "CSR is not PEM")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil || len(csr.URIs) != 1 {
		return nil, status.Errorf(codes.InvalidArgument, "CSR: %v", err)
	}
	asked := time.Duration(request.GetValidityDuration()) * time.Second
	a.mu.Lock()
	longest := a.longest
	a.mu.Unlock()
	if longest != 0 && asked > longest {
		return nil, status.Errorf(codes.InvalidArgument,
			"CSR signing error (requested TTL %v is greater than the max allowed TTL %v)", asked, longest)
	}
	leaf := a.workload(csr.PublicKey)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.signings = append(a.signings, Signing{Asked: csr.URIs[0].String(), Proof: proof})
	close(a.changed)
	a.changed = make(chan struct{})
	return &ca.IstioCertificateResponse{CertChain: []string{pemOf("CERTIFICATE", leaf.Raw), pemOf("CERTIFICATE", a.root.Raw)}}, nil
}

// hasCertificate reports whether the peer has a certificate of the authority. TLS has
// verified it.
func hasCertificate(ctx context.Context) bool {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return false
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	return ok && len(info.State.VerifiedChains) > 0
}

func pemOf(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}
