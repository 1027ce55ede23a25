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
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/internal/connlimit"
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

// startSecuredWith starts a server over TLS, after a change of its configuration. Its API server has Services of two
// namespaces, one of them private to its namespace, and the token "good" of a client in the namespace shop.
func startSecuredWith(t *testing.T, change func(*fakekube.API, *Config)) *secured {
	t.Helper()
	s := &secured{
		api: fakekube.Start(t), authority: fakexds.NewAuthority(t, serverName, "spiffe://cluster.local/ns/shop/sa/web"), log: testlog.New(t),
		files: auth.Files{Certificate: filepath.Join(t.TempDir(), "cert"), Key: filepath.Join(t.TempDir(), "key"), ClientCA: filepath.Join(t.TempDir(), "ca")},
	}
	s.api.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	s.api.Put(fakekube.Services, strings.Replace(svcYAML("data", "db", "10.0.0.2"), "namespace: data", "namespace: data, annotations: {networking.istio.io/exportTo: .}", 1))
	s.api.SetToken("good", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
	certificate, key := s.authority.Server()
	for path, text := range map[string]string{s.files.Certificate: certificate, s.files.Key: key, s.files.ClientCA: s.authority.Root()} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cfg := onAPI(t, s.api)
	cfg.TLSAddr, cfg.TLS, cfg.Logger, cfg.ClusterID = "127.0.0.1:0", s.files, s.log.Logger(), "mine"
	change(s.api, &cfg)
	s.running = start(t, cfg)
	return s
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

func pairOf(t *testing.T, authority *fakexds.Authority) *tls.Certificate {
	t.Helper()
	certificate, key := authority.Client()
	pair, err := tls.X509KeyPair([]byte(certificate), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	return &pair
}

// reviewed opens streams, as agents do, until the API server has reviewed their token in time. It returns the first push,
// or the other end of a stream.
func reviewed(open func() client) pushed {
	for {
		p := open().first()
		if status.Code(p.end) != codes.Unavailable || !strings.Contains(p.end.Error(), "Client.Timeout exceeded") {
			return p
		}
	}
}

// TestIdentity checks which clients get a table; a client that may connect gets the table of its
// identity's namespace.
func TestIdentity(t *testing.T) { // D44, D45, D46, D47, D48, D66
	s := startSecuredWith(t, func(*fakekube.API, *Config) {})
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
				got := reviewed(func() client { return open(t, variant, r, node(t, tt.namespace, tt.meta...)) })
				if tt.code == codes.OK && got.end == nil {
					if got := strings.Join(slices.Sorted(maps.Keys(merged(t, got.tables).GetTable())), " "); got != tt.want {
						t.Errorf("%s: hosts %s, want %s", variant, got, tt.want)
					}
					continue
				}
				err := got.end
				if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%s: %v, want %s with %q", variant, err, tt.code, tt.want)
				}
				wait.Until(t, "the log names the reason", func() bool { return strings.Contains(s.log.String(), strings.ReplaceAll(tt.want, `"`, `\"`)) })
			}
		})
	}
	for a := range s.Agents("") {
		if !a.TLS {
			t.Errorf("a client that has proven its identity is shown as %+v", a)
		}
	}
}

// TestTokensCannotBeReviewed checks that a client that is known connects while the API server is away. A new client gets
// an error that tells it to retry, with the rule that is missing.
func TestTokensCannotBeReviewed(t *testing.T) { // D49
	s := startSecuredWith(t, func(*fakekube.API, *Config) {})
	r := s.as(t, s.authority, &bearer{"good", ""}, nil)
	connect := func() client { return openDelta(t, r, node(t, "shop"), nil) }
	if p := reviewed(connect); p.end != nil {
		t.Fatal(p.end)
	}
	s.api.Refuse(fakekube.TokenReviews, http.StatusForbidden)
	connect().next()
	err := reviewed(func() client {
		return openDelta(t, s.as(t, s.authority, &bearer{"new", ""}, nil), node(t, "shop"), nil)
	}).end
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "tokenreviews") {
		t.Errorf("%v, want the rule that is missing", err)
	}
}

// A proven stream is of a client that has proven its identity.
type proven struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // as in the stream
}

func (p proven) Context() context.Context { return p.ctx }

// TestStreamEndsWithProof checks that a stream ends when the token or the certificate of its client ends.
func TestStreamEndsWithProof(t *testing.T) { // D46, D49
	synctest.Test(t, func(t *testing.T) {
		ends := time.Now().Add(time.Hour)
		review := func(context.Context, string) (auth.Identity, error) {
			return auth.Identity{Namespace: "shop", ServiceAccount: "web"}, nil
		}
		s := &adsServer{
			identities: &auth.Clients{Tokens: auth.NewTokens(review), TrustDomain: "cluster.local"},
			addresses:  perAddress{most: 1, taken: map[netip.Addr]int{}},
			memory:     newMemoryLimit(0, nil, nil),
		}
		token := "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, ends.Unix())) + ".c2ln"
		id := &url.URL{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/shop/sa/web"}
		chain := []*x509.Certificate{{URIs: []*url.URL{id}, NotAfter: ends}, {NotAfter: ends.Add(time.Hour)}}
		certificate := credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{chain}}}
		counting := intake.Credentials(insecure.NewCredentials(), func(net.Conn) *connlimit.Place { return nil })
		conn, _, err := counting.ServerHandshake(&arrival{address: "192.0.2.1"})
		if err != nil {
			t.Fatal(err)
		}
		from := func(info credentials.AuthInfo) context.Context {
			return peer.NewContext(t.Context(), &peer.Peer{Addr: conn.RemoteAddr(), AuthInfo: info})
		}
		for name, ctx := range map[string]context.Context{
			"token":       metadata.NewIncomingContext(from(nil), metadata.Pairs("authorization", "Bearer "+token)),
			"certificate": from(certificate),
		} {
			go func() {
				err := s.admit(s.identities)(nil, proven{ctx: ctx}, nil, func(_ any, stream grpc.ServerStream) error {
					<-stream.Context().Done()
					return context.Cause(stream.Context())
				})
				want := "the token or certificate of shop/web ended at " + ends.UTC().Format(time.RFC3339)
				if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %v", name, err)
				}
				if !time.Now().Equal(ends) {
					t.Errorf("%s: the stream ended at %v, want %v", name, time.Now(), ends)
				}
			}()
		}
		time.Sleep(2 * time.Hour) //nolint:forbidigo // of the bubble's clock
	})
}

// accepted reports whether the server and a client accept each other's certificates.
func (r running) accepted(t *testing.T) bool {
	t.Helper()
	stream, err := r.dial(t).DeltaAggregatedResources(t.Context(), grpc.WaitForReady(false))
	if err == nil {
		_ = stream.CloseSend() // so that the server ends the stream
		_, err = stream.Recv()
	}
	return status.Code(err) != codes.Unavailable
}

// D46: a certificate of another authority does not get as far as a stream.
func TestStranger(t *testing.T) {
	s := startSecuredWith(t, func(*fakekube.API, *Config) {})
	stranger := fakexds.NewAuthority(t, serverName, "spiffe://cluster.local/ns/shop/sa/web")
	if s.as(t, s.authority, nil, pairOf(t, stranger)).accepted(t) {
		t.Error("accepted")
	}
}

// D51: plaintext is for this host unless asked otherwise.
func TestPlaintextIsLocal(t *testing.T) {
	if got := DefaultConfig().GRPCAddr; got != "localhost:15010" {
		t.Errorf("%q", got)
	}
}
