package nds_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

const (
	istiod   = "istiod.istio-system.svc"
	identity = "spiffe://mesh.example/ns/shop/sa/default"
)

// certified is a control plane with a certificate authority, and the files of a VM.
type certified struct {
	server           *fakexds.Server
	authority        *fakexds.Authority
	dir, root, token string
	exchange         nds.WorkloadCert
}

func startCertified(t *testing.T, change func(*fakexds.Options)) certified {
	t.Helper()
	dir := t.TempDir()
	c := certified{
		authority: fakexds.NewAuthority(t, istiod, identity),
		dir:       dir, root: filepath.Join(dir, "root-cert.pem"), token: filepath.Join(dir, "istio-token"),
	}
	opts := fakexds.Options{Authority: c.authority, Token: "token-1"}
	if change != nil {
		change(&opts)
	}
	c.server = serve(t, opts)
	c.server.Push(hosts("a.example.com"))
	write(t, c.root, c.authority.Root())
	write(t, c.token, "token-1")
	return c
}

// start runs a client with the files and a state directory.
func (c certified) start(t *testing.T, more func(*nds.Config)) *harness {
	t.Helper()
	return start(t, options{server: c.server, config: func(cfg *nds.Config) {
		cfg.Plaintext, cfg.RootCA, cfg.TokenFile, cfg.StateDir = false, c.root, c.token, c.dir
		cfg.TrustDomain, cfg.WorkloadCert = "mesh.example", c.exchange
		if more != nil {
			more(cfg)
		}
	}})
}

// wantProof waits for the stream with this number and checks how the client
// authenticated.
func (h *harness) wantProof(stream int, proof string) fakexds.Request {
	h.t.Helper()
	r, err := h.server.WaitStream(h.ctx, stream)
	if err != nil {
		h.t.Fatal(err)
	}
	if r.Proof != proof {
		h.t.Fatalf("stream %d is proved by %q, want %q", stream, r.Proof, proof)
	}
	return r
}

// wantSigned waits for the n-th signed certificate and checks how the client
// authenticated.
func (h *harness) wantSigned(a *fakexds.Authority, n int, proof string) {
	h.t.Helper()
	signing, err := a.WaitSigned(h.ctx, n)
	if err != nil {
		h.t.Fatal(err)
	}
	if signing.Asked != identity || signing.Proof != proof {
		h.t.Fatalf("certificate %d is %+v, want one by %s", n, signing, proof)
	}
}

// C1: the token of a VM is exchanged for a certificate. The client connects with it after
// the token has expired, renews it, and uses it after a restart.
func TestTokenExchange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		c.authority.SetLife(6 * time.Second)
		h := c.start(t, nil)
		h.wantProof(1, "token")
		h.wantSigned(c.authority, 1, "token")
		obtained := time.Now()
		h.wantLog("level=INFO", "workload certificate obtained", identity)

		// The token expires, and then its file is removed.
		c.server.SetToken("another")
		write(t, c.token, jwt(time.Now().Add(-time.Hour)))
		c.server.CutStreams(nil)
		if r := h.wantProof(2, "certificate"); r.Header.Get("authorization") != nil {
			t.Error("an expired token was sent beside the certificate")
		}
		if err := os.Remove(c.token); err != nil {
			t.Fatal(err)
		}
		c.authority.SetLife(time.Hour)
		h.wantSigned(c.authority, 2, "certificate")
		if took := time.Since(obtained); took < 3*time.Second || took > 4*time.Second {
			t.Errorf("a certificate of 6 s is renewed after %v", took)
		}
		h.wantLogs(2, "workload certificate obtained")
		h.wantStatus(func(s nds.Status) bool { return time.Until(s.CertificateExpires) > 30*time.Minute })
		h.stop()
		info, err := os.Stat(filepath.Join(c.dir, "workload-certificate.pem"))
		if err != nil || info.Mode() != 0o600 {
			t.Fatalf("%v, %v", info, err)
		}
		again := c.start(t, nil)
		again.wantProof(3, "certificate")
		if n := h.logs.Count("level=WARN") + again.logs.Count("level=WARN"); n != 0 {
			t.Errorf("%d warnings", n)
		}
	})
}

// C1: a backdated certificate is not renewed again and again. istiod backdates by 2
// minutes, and to a host whose clock is fast every certificate is backdated.
func TestBackdatedCertificate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		c.authority.SetLife(time.Minute)
		c.authority.SetBackdate(2 * time.Minute)
		h := c.start(t, nil)
		h.wantSigned(c.authority, 1, "token")
		for stream := range 5 {
			h.wantLogs(stream+1, "table pushed")
			c.server.CutStreams(nil)
		}
		if n := h.logs.Count("workload certificate obtained"); n > 2 {
			t.Errorf("%d certificates were obtained", n)
		}
	})
}

// C1: with a control plane without an authority the client uses the token, and logs that
// once; as a warning if a certificate was asked for.
func TestNoAuthority(t *testing.T) {
	t.Parallel()
	for mode, level := range map[nds.WorkloadCert]string{"": "level=INFO", nds.WorkloadCertOn: "level=WARN"} {
		subtest(t, string(mode), func(t *testing.T) {
			t.Helper()
			c := startCertified(t, func(o *fakexds.Options) { o.NoSigning = true })
			h := c.start(t, func(cfg *nds.Config) { cfg.WorkloadCert = mode })
			h.wantProof(1, "token")
			h.wantLog(level, "workload certificate not obtained", "no certificate authority")
		})
	}
}

// C1: the token is not exchanged if kubelet renews it, if there is a client certificate,
// or if that is switched off.
func TestNoExchange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		proof string
		setup func(t *testing.T, c *certified) func(*nds.Config)
	}{
		{"kubelet", "token", func(t *testing.T, c *certified) func(*nds.Config) {
			t.Helper()
			// As kubelet's atomic writer does it.
			volume := filepath.Join(c.dir, "tokens")
			if err := os.MkdirAll(filepath.Join(volume, "..2026_11_21"), 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(volume, "..2026_11_21", "istio-token"), "token-1")
			for link, to := range map[string]string{"..data": "..2026_11_21", "istio-token": "..data/istio-token"} {
				if err := os.Symlink(to, filepath.Join(volume, link)); err != nil {
					t.Fatal(err)
				}
			}
			return func(cfg *nds.Config) { cfg.TokenFile = filepath.Join(volume, "istio-token") }
		}},
		{"off", "token", func(*testing.T, *certified) func(*nds.Config) {
			return func(cfg *nds.Config) { cfg.WorkloadCert = nds.WorkloadCertOff }
		}},
		{"client certificate", "certificate", func(t *testing.T, c *certified) func(*nds.Config) {
			t.Helper()
			return c.client(t)
		}},
	} {
		subtest(t, tc.name, func(t *testing.T) {
			t.Helper()
			c := startCertified(t, nil)
			h := c.start(t, tc.setup(t, &c))
			h.wantProof(1, tc.proof)
			c.server.CutStreams(nil)
			h.wantProof(2, tc.proof)
			h.stop()
			if _, err := os.Stat(filepath.Join(c.dir, "workload-certificate.pem")); err == nil {
				t.Error("the token was exchanged")
			}
		})
	}
}

// client makes a client certificate and returns a configuration that uses it.
func (c certified) client(t *testing.T) func(*nds.Config) {
	t.Helper()
	certificate, key := c.authority.Client()
	paths := []string{filepath.Join(c.dir, "cert-chain.pem"), filepath.Join(c.dir, "key.pem")}
	write(t, paths[0], certificate)
	write(t, paths[1], key)
	return func(cfg *nds.Config) { cfg.CertFile, cfg.KeyFile, cfg.TokenFile = paths[0], paths[1], "" }
}

// C1: a client certificate is read again on every connect. The error for one that cannot
// be read names its settings.
func TestClientCertificateIsReadAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		h := c.start(t, c.client(t))
		h.wantProof(1, "certificate")
		write(t, filepath.Join(c.dir, "key.pem"), "no key")
		c.server.CutStreams(nil)
		h.wantLog("level=WARN", "reading the client certificate (--xds-cert, --xds-key)")
		c.client(t) // another pair
		h.wantProof(2, "certificate")
	})
}

// C1: a certificate that the control plane refuses, because its authority has changed, is
// replaced by the token and then by a new certificate.
func TestRefusedCertificate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		h := c.start(t, nil)
		h.wantSigned(c.authority, 1, "token")
		h.wantLog("workload certificate obtained")
		h.stop()
		other := startCertified(t, nil)
		write(t, filepath.Join(c.dir, "root-cert.pem"), other.authority.Root())
		c.server, c.authority = other.server, other.authority
		h = c.start(t, nil)
		// The client may not read the alert before the connection ends.
		h.wantLog("level=WARN", "no stream to the control plane")
		h.wantSigned(c.authority, 1, "token")
		if _, err := c.server.WaitStream(h.ctx, 1); err != nil {
			t.Fatal(err)
		}
	})
}

// C1: if the token has expired, a certificate that a server refuses for a moment is kept,
// because it could not be replaced. A new token replaces a refused certificate and is
// exchanged.
func TestRefusedTemporarily(t *testing.T) {
	t.Parallel()
	subtest(t, "no token", func(t *testing.T) {
		t.Helper()
		c := startCertified(t, nil)
		h := c.start(t, nil)
		h.wantProof(1, "token")
		h.wantLog("table pushed")
		h.wantLog("workload certificate obtained")
		c.server.SetToken("another")
		write(t, c.token, jwt(time.Now().Add(-time.Hour)))
		c.authority.SetHandshake(func(*tls.Config) error { return errors.New("no certificate for now") })
		c.server.CutStreams(nil)
		h.wantLog("level=WARN", "no stream to the control plane", "remote error: tls: internal error")
		c.authority.SetHandshake(nil)
		h.wantProof(2, "certificate")
		h.wantStatus(func(s nds.Status) bool { return !s.CertificateExpires.IsZero() })
	})
	subtest(t, "new token", func(t *testing.T) {
		t.Helper()
		c := startCertified(t, nil)
		h := c.start(t, nil)
		h.wantProof(1, "token")
		h.wantLog("table pushed")
		h.wantLog("workload certificate obtained")
		write(t, c.token, jwt(time.Now().Add(-time.Hour)))
		c.authority.SetHandshake(func(c *tls.Config) error { c.ClientCAs = x509.NewCertPool(); return nil })
		c.server.CutStreams(nil)
		h.wantLog("level=WARN", "no stream to the control plane", "remote error: tls: unknown certificate authority")
		token := jwt(time.Now().Add(time.Hour))
		c.server.SetToken(token)
		write(t, c.token, token)
		h.wantProof(2, "token")
	})
}

// C1: if the authority refuses the requested life, the client lets it choose.
func TestShortLifeOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		c.authority.SetLongest(time.Hour)
		c.authority.SetLife(time.Hour)
		h := c.start(t, nil)
		h.wantSigned(c.authority, 1, "token")
		h.wantLog("level=INFO", "workload certificate obtained")
		if n := h.logs.Count("level=WARN"); n != 0 {
			t.Errorf("%d warnings", n)
		}
	})
}

// C1: the token is used with a control plane that refuses the certificate and accepts the
// token.
func TestTokenBesideCertificate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		h := c.start(t, nil)
		h.wantLog("workload certificate obtained")
		h.stop()
		c.server = serve(t, fakexds.Options{Authority: c.authority, Token: "token-1", RefuseCertificates: true})
		c.server.Push(hosts("a.example.com"))
		h = c.start(t, nil)
		h.wantLog("level=WARN", "PermissionDenied", `namespace \"shop\" (--namespace) and service account \"default\" (--service-account)`)
		h.wantProof(1, "token")
		h.wantSigned(c.authority, 2, "token") // it may be the certificate's fault
	})
}

// C1: a certificate file that cannot be read at the start is read later. If the token has
// expired meanwhile, no other credential is left.
func TestCertificateReadLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		h := c.start(t, nil)
		h.wantProof(1, "token")
		h.wantLog("workload certificate obtained")
		h.stop()
		c.server.SetToken("another")
		write(t, c.token, jwt(time.Now().Add(-time.Hour)))
		path := filepath.Join(c.dir, "workload-certificate.pem")
		unreadable(t, path)
		h = c.start(t, nil)
		h.wantLog("level=WARN", "the saved workload certificate cannot be read")
		h.wantLog("level=WARN", "workload certificate not obtained or renewed", "has expired")
		readable(t, path)
		h.wantProof(2, "certificate")
	})
}

// C1, C7: a certificate for another identity, from the file or from the authority, is
// logged and not used.
func TestForeignCertificate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		for text, reason := range map[string]string{
			"":                       "PEM",
			"no certificate":         "PEM",
			pairOf(c.authority):      "/ns/other/sa/default",
			pairOf(c.authority)[40:]: "PEM",
			pairOf(fakexds.NewAuthority(t, istiod, "spiffe://mesh.example/ns/oth%65r/sa/default")): "oth%65r",
		} {
			write(t, filepath.Join(c.dir, "workload-certificate.pem"), text)
			h := c.start(t, func(cfg *nds.Config) { cfg.Node.Namespace = "other" })
			h.wantLog("level=WARN", "the saved workload certificate is not used", reason)
			h.wantLog("level=WARN", "workload certificate not obtained or renewed", "--service-account")
			h.wantStatus(func(s nds.Status) bool { return strings.Contains(s.CertificateError, "--service-account") })
			h.stop()
		}
	})
}

func pairOf(a *fakexds.Authority) string {
	certificate, key := a.Client()
	return strings.TrimSpace(key) + "\n" + certificate
}
