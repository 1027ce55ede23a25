package auth

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// TestCertificateRotates checks that new connections get a new certificate, and that a broken file does no harm.
func TestCertificateRotates(t *testing.T) { // D50
	dir, log := t.TempDir(), testlog.New(t)
	files := Files{Certificate: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "ca")}
	put := func(certificate, key, root string) {
		t.Helper()
		for path, text := range map[string]string{files.Certificate: certificate, files.Key: key, files.ClientCA: root} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	use := func() string {
		t.Helper()
		authority := fakexds.NewAuthority(t, "discovery.test", "spiffe://cluster.local/ns/shop/sa/web")
		certificate, key := authority.Server()
		put(certificate, key, authority.Root())
		return certificate
	}
	first := use()
	second := ""
	synctest.Test(t, func(t *testing.T) {
		s, err := NewServer(files, nil, log.Logger())
		if err != nil {
			t.Fatal(err)
		}
		presented := func() []byte {
			t.Helper()
			certificate, err := s.Certificate(nil)
			if err != nil {
				t.Fatal(err)
			}
			return certificate.Certificate[0]
		}
		before := presented()
		if second = use(); second == first {
			t.Fatal("both certificates are the same")
		}
		pass(checkEvery)
		after := presented()
		if bytes.Equal(before, after) {
			t.Error("the certificate is not replaced")
		}
		put("broken", "broken", "broken")
		pass(checkEvery)
		if !bytes.Equal(presented(), after) || log.Count("the previous TLS certificate stays in use", files.Certificate) != 1 {
			t.Errorf("a broken file is used, or the log does not name it: %s", log)
		}
		if _, err := NewServer(files, nil, log.Logger()); err == nil || !strings.Contains(err.Error(), files.Certificate) {
			t.Errorf("started with a broken file: %v; want an error that names it", err)
		}
	})
}
