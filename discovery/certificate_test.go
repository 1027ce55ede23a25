package discovery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestTLSFlags checks that flags which contradict each other are refused.
func TestTLSFlags(t *testing.T) {
	for _, cfg := range []Config{{TLSAddr: ":0"}, {TLSAddr: ":0", TLS: auth.Files{Key: "key"}}, {Certificate: true, TLS: auth.Files{Certificate: "cert"}}} {
		cfg.ConfigDir = t.TempDir()
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "set --tls-cert and --tls-key") {
			t.Errorf("%+v: %v", cfg.TLS, err)
		}
	}
}

// TestCertificateExpired checks that a server whose certificate has expired says so, and does not replace another one.
func TestCertificateExpired(t *testing.T) { // D50
	t.Parallel()
	dir := t.TempDir()
	files := auth.Files{Certificate: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	put := func(until time.Duration) {
		t.Helper()
		certificate, key := fakexds.SelfSigned(t, 1, -time.Hour, until)
		for path, text := range map[string]string{files.Certificate: certificate, files.Key: key} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(-time.Minute)
	api := fakekube.Start(t)
	cfg := onAPI(t, api)
	cfg.TLSAddr, cfg.TLS = "127.0.0.1:0", files
	s := start(t, cfg)
	if why := s.Waiting(); !strings.Contains(why, "has expired at") || s.Problem() == nil {
		t.Errorf("waiting for %q", why)
	}
	put(time.Hour)
	wait.Until(t, "the certificate is used", func() bool { return s.Waiting() == "" && s.Problem() == nil })
}
