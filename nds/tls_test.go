package nds_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/internal/clock"
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

// C1: if the dates of a file say that the server refuses it, the error names the file, the date and what to do, whatever
// the error of the connection was. It is the same at each attempt, so it is logged once.
func TestOutdatedFiles(t *testing.T) {
	t.Parallel()
	past, future := "has expired at 2000-01-01T23:00:00Z: put a new one there", "is not valid before 2000-01-02T02:00:00Z: check the clock of this host"
	const cert, root = "the client certificate in %s/cert-chain.pem (--xds-cert) ", "reading root certificates (XDS_ROOT_CA, --xds-root-ca): the last root certificate in %s/root-cert.pem "
	for _, tc := range []struct {
		name string
		// before and after are the distances of the certificate's dates from now.
		before, after time.Duration
		file, want    string
	}{
		{"expired certificate", -2 * time.Hour, -time.Hour, "certificate", cert + past},
		{"early certificate", 2 * time.Hour, 3 * time.Hour, "certificate", cert + future},
		{"expired root", -2 * time.Hour, -time.Hour, "root", root + past},
		{"early root", 2 * time.Hour, 3 * time.Hour, "root", root + future},
		{"expired token", 0, -time.Hour, "token", "the token in %s/istio-token (--xds-token-file) " + past},
	} {
		for fault, dial := range map[string]func(context.Context, string) (net.Conn, error){
			"alert": nil,
			"EPIPE": func(context.Context, string) (net.Conn, error) {
				near, far := net.Pipe()
				return near, far.Close()
			},
			"refused": func(context.Context, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED },
		} {
			subtest(t, tc.name+", "+fault, func(t *testing.T) {
				t.Helper()
				clock.Sleep(t.Context(), 24*time.Hour)
				c := startCertified(t, nil)
				c.exchange = nds.WorkloadCertOff
				var config func(*nds.Config)
				switch tc.file {
				case "root":
					root, _ := fakexds.SelfSigned(t, 1, tc.before, tc.after)
					write(t, c.root, root)
				case "token":
					write(t, c.token, jwt(time.Now().Add(tc.after)))
				default:
					c.authority.SetBackdate(-tc.before)
					c.authority.SetLife(tc.after)
					config = c.client(t)
				}
				h := c.start(t, func(cfg *nds.Config) {
					if config != nil {
						config(cfg)
					}
					if dial != nil {
						cfg.Dial = dial
					}
				})
				h.wantStatus(func(s nds.Status) bool { return s.Reconnects > 5 })
				want := fmt.Sprintf(tc.want, c.dir)
				if got := h.client.Status().LastError; !strings.HasPrefix(got, want) || h.logs.Count("level=WARN") != 1 {
					t.Errorf("the error is %q, want %q", got, want)
				}
				code := map[string]string{"certificate": "certificate_expired", "root": "control_plane_file", "token": "token_expired"}[tc.file]
				if codes, _ := found(t, h.client); codes != code {
					t.Errorf("the problems are %q, want %q", codes, code)
				}
			})
		}
	}
}

// C1: one root certificate that is valid is enough.
func TestOutdatedRootBesideValid(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := startSecured(t)
		past, _ := fakexds.SelfSigned(t, 1, -2*time.Hour, -time.Hour)
		future, _ := fakexds.SelfSigned(t, 2, time.Hour, 2*time.Hour)
		write(t, s.root, past+s.authority.Root()+future)
		h := s.start(t, nil)
		h.wantACK("v1")
	})
}

// C1: the metric and the status have the date of the client certificate in the file, which the next connection uses.
func TestClientCertificateExpiry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		registry := prometheus.NewRegistry()
		config := c.client(t)
		h := c.start(t, func(cfg *nds.Config) {
			config(cfg)
			cfg.Registerer = registry
		})
		h.wantACK("v1")
		for _, life := range []time.Duration{24 * time.Hour, time.Hour} {
			c.authority.SetLife(life)
			c.client(t)
			want := time.Now().Add(life).Truncate(time.Second)
			if got := h.client.Status().CertificateExpires; !got.Equal(want) {
				t.Errorf("the status has %v, want %v", got, want)
			}
			const name = "nametap_xds_certificate_expiry_timestamp_seconds"
			text := fmt.Sprintf("# HELP %s When the client certificate or the workload certificate expires, in Unix time; 0 without one.\n# TYPE %[1]s gauge\n%[1]s %d\n", name, want.Unix())
			if err := testutil.GatherAndCompare(registry, strings.NewReader(text), name); err != nil {
				t.Error(err)
			}
		}
	})
}
