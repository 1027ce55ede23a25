package auth

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// put writes a certificate that is valid between two times from now, and its key.
func (f Files) put(t *testing.T, serial int64, from, to time.Duration) {
	t.Helper()
	certificate, key := fakexds.SelfSigned(t, serial, from, to)
	for path, text := range map[string]string{f.Certificate: certificate, f.Key: key} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// follow runs a server in the bubble, and returns it.
func follow(t *testing.T, files Files, log *testlog.Buffer) *Server {
	t.Helper()
	s, err := NewServer(files, log.Logger())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go s.Run(ctx)
	return s
}

// has checks which certificate is presented, and whether clients can use it, after the files were checked.
func (s *Server) has(t *testing.T, serial int64, problem string) {
	t.Helper()
	pass(checkEvery)
	synctest.Wait()
	certificate, err := s.Certificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	if s.Problem() != nil {
		got = s.Problem().Error()
	}
	if certificate.Leaf.SerialNumber.Int64() != serial || (problem == "") != (got == "") || !strings.Contains(got, problem) {
		t.Errorf("the certificate %d, and %q, want %d and %q", certificate.Leaf.SerialNumber, got, serial, problem)
	}
}

func newFiles(t *testing.T) Files {
	t.Helper()
	dir := t.TempDir()
	return Files{Certificate: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
}

// TestCertificateRotates checks that new connections get a new certificate, and that files that cannot be used, or whose
// certificate is not valid, do no harm.
func TestCertificateRotates(t *testing.T) { // D50
	files, log := newFiles(t), testlog.New(t)
	synctest.Test(t, func(t *testing.T) {
		files.put(t, 1, -time.Minute, time.Hour)
		s := follow(t, files, log)
		s.has(t, 1, "")
		files.put(t, 2, -time.Minute, time.Hour)
		s.has(t, 2, "")
		if err := os.WriteFile(files.Certificate, []byte("broken"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.has(t, 2, "")
		s.has(t, 2, "")
		if log.Count("the previous TLS certificate stays in use", files.Certificate) != 1 {
			t.Errorf("the log does not name a broken file once: %s", log)
		}
		if _, err := NewServer(files, log.Logger()); err == nil || !strings.Contains(err.Error(), files.Certificate) {
			t.Errorf("started with a broken file: %v; want an error that names it", err)
		}
		files.put(t, 3, -time.Hour, -time.Minute)
		s.has(t, 2, "")
		files.put(t, 4, time.Minute, time.Hour) // the clock of the machine that made it is ahead
		s.has(t, 2, "")
		pass(time.Minute)
		s.has(t, 4, "")
	})
}

// TestCertificateExpires checks that a certificate that is not valid, or expires, is named in the log, and is no reason
// to leave one that is not valid either in use.
func TestCertificateExpires(t *testing.T) { // D50
	files, log := newFiles(t), testlog.New(t)
	synctest.Test(t, func(t *testing.T) {
		files.put(t, 1, time.Minute, time.Hour)
		s := follow(t, files, log)
		s.has(t, 1, "is not valid before 2000-01-01T00:01:00Z")
		if chans.Closed(s.Valid()) {
			t.Error("it counts as valid")
		}
		pass(time.Minute)
		s.has(t, 1, "")
		if !chans.Closed(s.Valid()) {
			t.Error("it does not count as valid")
		}
		pass(time.Hour)
		s.has(t, 1, "has expired at 2000-01-01T01:00:00Z")
		files.put(t, 2, -time.Hour, -time.Minute)
		s.has(t, 2, "has expired at 2000-01-01T01:00:")
		files.put(t, 3, -time.Hour, time.Minute)
		s.has(t, 3, "")
	})
	if log.Count("level=ERROR", "no client can connect over TLS", "is not valid") != 1 || log.Count("level=ERROR", "has expired") != 2 {
		t.Errorf("the log does not say each once: %s", log)
	}
}
