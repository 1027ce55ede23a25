package nds_test

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// startSecured starts a control plane with TLS, whose clients use the token.
func startSecured(t *testing.T) certified {
	t.Helper()
	c := startCertified(t, nil)
	c.exchange = nds.WorkloadCertOff
	return c
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// C1: TLS, with the token as a credential of the stream.
func TestTLS(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := startSecured(t)
		h := s.start(t, nil)
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.wantACK("v1")
		r, err := s.server.WaitStream(h.ctx, 1)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Header.Get("authorization"); !slices.Equal(got, []string{"Bearer token-1"}) {
			t.Fatalf("authorization is %q", got)
		}
		if got := r.Header.Get("clusterid"); got != nil {
			t.Fatalf("clusterid is %q, want none for the default cluster", got)
		}
	})
}

// C1: the token file is read again on every connect, because Kubernetes replaces it.
func TestTokenIsReadAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := startSecured(t)
		h := s.start(t, func(cfg *nds.Config) { cfg.Node.ClusterID = "west" })
		h.wantACK("v1")
		s.server.SetToken("token-2")
		s.server.CutStreams(nil)
		h.wantLog("level=WARN", "no stream to the control plane", "Unauthenticated")
		write(t, s.token, "token-2")
		r, err := s.server.WaitStream(h.ctx, 2)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Header.Get("authorization"); !slices.Equal(got, []string{"Bearer token-2"}) {
			t.Fatalf("authorization is %q", got)
		}
		if got := r.Header.Get("clusterid"); !slices.Equal(got, []string{"west"}) {
			t.Fatalf("clusterid is %q", got)
		}
	})
}

// jwt returns a token with an expiry. Its signature is not checked.
func jwt(expires time.Time) string {
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(`{"alg":"none"}`)) + "." + encode(fmt.Appendf(nil, `{"aud":["istio-ca"],"exp":%d}`, expires.Unix())) + ".c2ln"
}

// C1: errors in the files or the certificate are logged with the setting to look at.
// After they are fixed, the client connects.
func TestTLSErrors(t *testing.T) {
	t.Parallel()
	otherRoot := fakexds.NewAuthority(t, istiod, identity).Root()
	missing := filepath.Join(t.TempDir(), "missing")
	for _, tc := range []struct {
		name   string
		config func(*nds.Config)
		root   string
		token  string
		logged string
	}{
		{name: "other name", config: func(cfg *nds.Config) { cfg.ServerName = "istiod.other.svc" }, logged: "--xds-server-name"},
		{name: "plaintext", config: func(cfg *nds.Config) { cfg.Plaintext = true }, logged: "leave out --xds-plaintext"},
		{name: "system roots", config: func(cfg *nds.Config) { cfg.RootCA = "" }, logged: "the system's root certificates (XDS_ROOT_CA, --xds-root-ca)"},
		{name: "no root file", config: func(cfg *nds.Config) { cfg.RootCA = missing }, logged: "reading root certificates"},
		{name: "no token file", config: func(cfg *nds.Config) { cfg.TokenFile = missing }, logged: "reading the token (--xds-token-file)"},
		{name: "no token", config: func(cfg *nds.Config) { cfg.TokenFile = "" }, logged: "--xds-token-file is empty"},
		{name: "other root", root: otherRoot, logged: "XDS_ROOT_CA"},
		{name: "root not PEM", root: "hello", logged: "no certificate in"},
		{name: "empty token", token: "\n", logged: "is empty"},
		{name: "two tokens", token: "one\ntwo\n", logged: "more than one token"},
		{name: "expired token", token: jwt(time.Unix(1e8, 0)), logged: "istio-token (--xds-token-file) has expired at"},
		{name: "wrong token", token: "token-0", logged: "istio-token (--xds-token-file) was refused"},
		{
			name: "unknown cluster", token: "token-0", config: func(cfg *nds.Config) { cfg.Node.ClusterID = "west" },
			logged: `must know the cluster \"west\" (--cluster-id)`,
		},
	} {
		subtest(t, tc.name, func(t *testing.T) {
			t.Helper()
			s := startSecured(t)
			root, err := os.ReadFile(s.root)
			if err != nil {
				t.Fatal(err)
			}
			if tc.root != "" {
				write(t, s.root, tc.root)
			}
			if tc.token != "" {
				write(t, s.token, tc.token)
			}
			h := s.start(t, tc.config)
			h.wantLog("level=WARN", "no stream to the control plane", tc.logged)
			h.wantStatus(func(s nds.Status) bool { return !s.Connected && s.LastError != "" })
			if tc.config != nil {
				return
			}
			write(t, s.root, string(root))
			write(t, s.token, "token-1")
			h.wantApplied(plain(t, hosts("a.example.com")))
		})
	}
}

// C1: the error for a port without TLS names the setting.
func TestTLSToPlaintext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := startSecured(t)
		s.server = serve(t, fakexds.Options{})
		h := s.start(t, nil)
		h.wantLog("level=WARN", "no stream to the control plane", "the server does not speak TLS: --xds-plaintext")
	})
}
