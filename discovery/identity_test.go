package discovery

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A secured is a server that serves over TLS, and what it was made of.
type secured struct {
	running
	api       *fakekube.API
	authority *fakexds.Authority
	files     auth.Files
	log       *testlog.Buffer
}

const serverName = "discovery.test"

// startSecured starts a server over TLS with an API server that has three namespaces' Services, one
// of them private to its namespace.
func startSecured(t *testing.T) *secured {
	t.Helper()
	return startSecuredWith(t, func(*fakekube.API, *Config) {})
}

// startSecuredWith is startSecured after a change of the configuration.
func startSecuredWith(t *testing.T, change func(*fakekube.API, *Config)) *secured {
	t.Helper()
	s := &secured{
		api: fakekube.Start(t), authority: fakexds.NewAuthority(t, serverName, "spiffe://cluster.local/ns/shop/sa/web"), log: testlog.New(t),
		files: auth.Files{Certificate: filepath.Join(t.TempDir(), "cert"), Key: filepath.Join(t.TempDir(), "key"), ClientCA: filepath.Join(t.TempDir(), "ca")},
	}
	s.api.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	s.api.Put(fakekube.Services, strings.Replace(svcYAML("data", "db", "10.0.0.2"), "namespace: data", "namespace: data, annotations: {networking.istio.io/exportTo: .}", 1))
	s.use(t, s.authority)
	cfg := onAPI(t, s.api)
	cfg.TLSAddr, cfg.TLS, cfg.Logger, cfg.ClusterID = "127.0.0.1:0", s.files, s.log.Logger(), "mine"
	change(s.api, &cfg)
	s.running = start(t, cfg)
	return s
}

// use writes the files of an authority.
func (s *secured) use(t *testing.T, authority *fakexds.Authority) {
	t.Helper()
	certificate, key := authority.Server()
	for path, text := range map[string]string{s.files.Certificate: certificate, s.files.Key: key, s.files.ClientCA: authority.Root()} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// bearer sends a token, and the name of a cluster unless it is empty.
type bearer struct{ token, cluster string }

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	headers := map[string]string{"authorization": "Bearer " + b.token}
	if b.cluster != "" {
		headers["clusterid"] = b.cluster
	}
	return headers, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// as returns the server for clients that trust an authority, and send these credentials.
func (s *secured) as(t *testing.T, trusted *fakexds.Authority, token *bearer, pair *tls.Certificate) running {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(trusted.Root()))
	config := &tls.Config{RootCAs: pool, ServerName: serverName, MinVersion: tls.VersionTLS12}
	if pair != nil {
		config.Certificates = []tls.Certificate{*pair}
	}
	r := s.running
	r.with = []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}
	if token != nil {
		r.with = append(r.with, grpc.WithPerRPCCredentials(token))
	}
	return r
}

func (s *secured) good() {
	s.api.SetToken("good", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
}

func pairOf(t *testing.T, authority *fakexds.Authority) *tls.Certificate {
	t.Helper()
	certificate, key := authority.Client()
	pair, err := tls.X509KeyPair([]byte(certificate), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	return &pair
}

// TestIdentity checks which clients get a table; a client that may connect gets the table of its
// identity's namespace.
func TestIdentity(t *testing.T) { // D44, D45, D46, D47, D48
	t.Parallel()
	s := startSecured(t)
	s.good()
	s.api.SetToken("other audience", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"api"}})
	s.api.SetToken("expired", fakekube.Token{Error: "service account token has expired"})
	s.api.SetToken("user", fakekube.Token{User: "admin", Audiences: []string{"istio-ca"}})
	s.api.SetToken("data", fakekube.Token{User: "system:serviceaccount:data:db", Audiences: []string{"istio-ca"}})
	const shop, data = "web.shop.svc.cluster.local", "db.data.svc.cluster.local web.shop.svc.cluster.local"
	for _, tt := range []struct {
		name      string
		token     *bearer
		pair      *tls.Certificate
		namespace string
		meta      []string
		code      codes.Code
		want      string // hosts, or a part of the error
	}{
		{"token", &bearer{"good", ""}, nil, "shop", nil, codes.OK, shop},
		{"token and cluster", &bearer{"good", "mine"}, nil, "shop", nil, codes.OK, shop},
		{"token of another namespace", &bearer{"data", ""}, nil, "data", nil, codes.OK, data},
		{"certificate", nil, pairOf(t, s.authority), "shop", nil, codes.OK, shop},
		{"service account", &bearer{"good", ""}, nil, "shop", []string{"SERVICE_ACCOUNT", "web"}, codes.OK, shop},
		{"nothing", nil, nil, "shop", nil, codes.Unauthenticated, "no token and no client certificate"},
		{"unknown token", &bearer{"nonsense", ""}, nil, "shop", nil, codes.Unauthenticated, "invalid bearer token"},
		{"other audience", &bearer{"other audience", ""}, nil, "shop", nil, codes.Unauthenticated, `["api"] is invalid`},
		{"expired", &bearer{"expired", ""}, nil, "shop", nil, codes.Unauthenticated, "token has expired"},
		{"user", &bearer{"user", ""}, nil, "shop", nil, codes.Unauthenticated, `user "admin"`},
		{"other cluster", &bearer{"good", "yours"}, nil, "shop", nil, codes.Unauthenticated, `cluster "yours"`},
		{"claims a namespace", &bearer{"good", ""}, nil, "data", nil, codes.PermissionDenied, `claims the namespace "data", and its identity is shop/web`},
		{"claims a namespace with a certificate", nil, pairOf(t, s.authority), "data", nil, codes.PermissionDenied, `claims the namespace "data"`},
		{"claims a namespace in its metadata", &bearer{"good", ""}, nil, "shop", []string{"NAMESPACE", "data"}, codes.PermissionDenied, `claims the namespace "data"`},
		{"claims a service account", &bearer{"good", ""}, nil, "shop", []string{"SERVICE_ACCOUNT", "db"}, codes.PermissionDenied, `claims the service account "db"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := s.as(t, s.authority, tt.token, tt.pair)
			for _, variant := range []string{variantSotw, variantDelta} {
				c := open(t, variant, r, node(t, tt.namespace, tt.meta...))
				if tt.code == codes.OK {
					if got := strings.Join(slices.Sorted(maps.Keys(merged(t, c.next().tables).GetTable())), " "); got != tt.want {
						t.Errorf("%s: hosts %s, want %s", variant, got, tt.want)
					}
					continue
				}
				err := c.err()
				if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%s: %v, want %s with %q", variant, err, tt.code, tt.want)
				}
				wait.Until(t, "the log names the reason", func() bool { return strings.Contains(s.log.String(), strings.ReplaceAll(tt.want, `"`, `\"`)) })
			}
		})
	}
}

// TestAgentsOverTLS checks that clients that have proven their identity are shown as such.
func TestAgentsOverTLS(t *testing.T) { // D66
	t.Parallel()
	s := startSecured(t)
	s.good()
	openDelta(t, s.as(t, s.authority, &bearer{"good", ""}, nil), node(t, "shop"), nil).next()
	if all := slices.Collect(s.Agents("")); len(all) != 1 || !all[0].TLS || all[0].Namespace != "shop" {
		t.Errorf("%+v", all)
	}
	if all := slices.Collect(s.Agents("other")); len(all) != 0 {
		t.Errorf("%+v", all)
	}
}

// TestOneReview checks that a token is reviewed once, and that a client that is known connects
// while the API server is away. A new client gets an error that tells it to retry.
func TestOneReview(t *testing.T) { // D49
	t.Parallel()
	s := startSecured(t)
	s.good()
	r := s.as(t, s.authority, &bearer{"good", ""}, nil)
	for range 5 {
		openDelta(t, r, node(t, "shop"), nil).next()
	}
	if n := s.api.Reviews(); n != 1 {
		t.Errorf("%d reviews", n)
	}
	s.api.Refuse(fakekube.TokenReviews, http.StatusServiceUnavailable)
	openDelta(t, r, node(t, "shop"), nil).next()
	unknown := s.as(t, s.authority, &bearer{"new", ""}, nil)
	if err := openDelta(t, unknown, node(t, "shop"), nil).err(); status.Code(err) != codes.Unavailable {
		t.Errorf("%v, want Unavailable", err)
	}
	s.api.Refuse(fakekube.TokenReviews, http.StatusForbidden)
	err := openDelta(t, unknown, node(t, "shop"), nil).err()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "tokenreviews") {
		t.Errorf("%v, want the rule that is missing", err)
	}
}

// TestMadeUpTokens sends made-up tokens from one address, as fast as they are refused, while clients of another address
// connect for the first time and again. A review takes 20 ms.
func TestMadeUpTokens(t *testing.T) { // D49
	t.Parallel()
	s := startSecured(t)
	s.api.SetReviewTime(20 * time.Millisecond)
	for i := range 20 {
		s.api.SetToken(fmt.Sprint("good", i), fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
	}
	from := func(address string, token *bearer) running {
		r := s.as(t, s.authority, token, nil)
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
		r.with = append(r.with, grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", to) }))
		return r
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var flood sync.WaitGroup
	defer flood.Wait()
	var refused atomic.Int64
	for i := range 15 { // connections with as many streams as they may have
		attacker := from("127.0.0.66", nil).dial(t)
		for j := range maxStreamsPerConn {
			flood.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					made := metadata.AppendToOutgoingContext(ctx, "authorization", fmt.Sprintf("Bearer made-up-%d-%d-%d", i, j, n))
					if stream, err := attacker.DeltaAggregatedResources(made); err == nil {
						_, err = stream.Recv()
						if status.Code(err) == codes.Unauthenticated {
							refused.Add(1)
						}
					}
				}
			})
		}
	}
	wait.Until(t, "tokens are refused", func() bool { return refused.Load() > 100 })
	for range 2 {
		for i := range 20 {
			began := time.Now()
			openDelta(t, from("127.0.0.1", &bearer{fmt.Sprint("good", i), ""}), node(t, "shop"), nil).next()
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("a client is served after %v", took)
			}
		}
	}
	cancel()
	flood.Wait()
	if n := s.api.BusiestReviews(); n > 8 {
		t.Errorf("%d reviews at a time, of two addresses", n)
	}
	t.Logf("%d made-up tokens refused", refused.Load())
}

// TestStreamEndsWithProof checks that a stream ends when the token or the certificate of its client ends, and that
// streams of the next one stay.
func TestStreamEndsWithProof(t *testing.T) { // D46, D49
	t.Parallel()
	s := startSecured(t)
	s.good()
	const life = 5 * time.Second
	proofs := map[string]func(ends time.Time) running{
		"token": func(ends time.Time) running {
			token := "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, ends.Unix())) + ".c2ln"
			s.api.SetToken(token, fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
			return s.as(t, s.authority, &bearer{token, ""}, nil)
		},
		"certificate": func(ends time.Time) running {
			s.authority.SetLife(time.Until(ends))
			defer s.authority.SetLife(time.Hour)
			return s.as(t, s.authority, nil, pairOf(t, s.authority))
		},
	}
	type opened struct {
		name string
		client
		ends time.Time
	}
	var all []opened
	for name, prove := range proofs {
		for _, variant := range []string{variantSotw, variantDelta} {
			ends := time.Now().Add(life).Truncate(time.Second)
			all = append(all, opened{name + " " + variant, open(t, variant, prove(ends), node(t, "shop")), ends})
			all[len(all)-1].next()
		}
	}
	next := open(t, variantDelta, s.as(t, s.authority, &bearer{"good", ""}, nil), node(t, "shop"))
	next.next()
	for _, c := range all {
		err := c.err()
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the token or certificate of shop/web ended at "+c.ends.UTC().Format(time.RFC3339)) {
			t.Errorf("%s: %v", c.name, err)
		}
		if early := time.Until(c.ends); early > time.Second {
			t.Errorf("%s: the stream ended %v before it", c.name, early)
		}
	}
	s.api.Put(fakekube.Services, svcYAML("shop", "more", "10.0.0.3"))
	next.next()
}

// TestCertificateRotates checks that new connections get a new certificate, that open streams stay,
// and that a broken file does no harm.
func TestCertificateRotates(t *testing.T) { // D50
	t.Parallel()
	s := startSecured(t)
	s.good()
	token := &bearer{"good", ""}
	before := openDelta(t, s.as(t, s.authority, token, nil), node(t, "shop"), nil)
	before.next()
	connects := func(authority *fakexds.Authority) bool { return s.as(t, authority, token, nil).accepted(t) }
	next := fakexds.NewAuthority(t, serverName, "spiffe://cluster.local/ns/shop/sa/web")
	s.use(t, next)
	wait.Until(t, "the new certificate is in use", func() bool { return connects(next) && !connects(s.authority) })
	if err := os.WriteFile(s.files.Certificate, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the broken file is named", func() bool {
		return connects(next) && s.log.Count("the previous TLS certificate stays in use", s.files.Certificate) == 1
	})
	s.api.Put(fakekube.Services, svcYAML("shop", "more", "10.0.0.3"))
	before.next()
}

// accepted reports whether the server and a client accept each other's certificates.
func (r running) accepted(t *testing.T) bool {
	t.Helper()
	stream, err := r.dial(t).DeltaAggregatedResources(t.Context())
	if err == nil {
		_ = stream.CloseSend() // so that the server ends the stream
		_, err = stream.Recv()
	}
	return status.Code(err) != codes.Unavailable
}

// D46: a certificate of another authority does not get as far as a stream.
func TestStranger(t *testing.T) {
	t.Parallel()
	s := startSecured(t)
	stranger := fakexds.NewAuthority(t, serverName, "spiffe://cluster.local/ns/shop/sa/web")
	if s.as(t, s.authority, nil, pairOf(t, stranger)).accepted(t) {
		t.Error("accepted")
	}
}

// D51: plaintext is for this host unless asked otherwise.
func TestPlaintextIsLocal(t *testing.T) {
	t.Parallel()
	if got := DefaultConfig().GRPCAddr; got != "localhost:15010" {
		t.Errorf("%q", got)
	}
}
