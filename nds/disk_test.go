package nds_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// silentFile returns a file of a disk that does not answer until the test ends: a named pipe, because opening one blocks
// until it has another end.
func silentFile(t *testing.T, path string) string {
	t.Helper()
	pipe := filepath.Join(t.TempDir(), "pipe") // stays if the client replaces path
	if err := errors.Join(unix.Mkfifo(pipe, 0o600), os.Link(pipe, path)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if other, err := os.OpenFile(pipe, os.O_RDWR|unix.O_NONBLOCK, 0); err == nil {
			_ = other.Close()
		}
	})
	return path
}

// promptly calls f, and fails the test if f takes longer than limit.
func promptly(t *testing.T, what string, limit time.Duration, f func()) {
	t.Helper()
	began := time.Now()
	f()
	if took := time.Since(began); took > limit {
		t.Errorf("%s takes %v", what, took)
	}
}

// C5, R1: if the disk of the token does not answer, the error names the file, and neither the description of the token
// nor the end waits for the disk.
func TestTokenOnSilentDisk(t *testing.T) {
	t.Parallel()
	c := startCertified(t, nil)
	file := silentFile(t, filepath.Join(t.TempDir(), "token"))
	h := c.start(t, func(cfg *nds.Config) { cfg.TokenFile = file })
	h.wantLog("level=WARN", "no stream to the control plane", "reading the token (--xds-token-file): read "+file+": the disk has not answered")
	promptly(t, "Token", wait.Limit/10, func() {
		for range 100 {
			if got := h.client.Token(); got.File != file {
				t.Errorf("%+v, want the file %s", got, file)
			}
		}
	})
	promptly(t, "the end", 10*time.Second, h.stop)
}

// C5, R1: the same for the addresses and labels of the node.
func TestNodeOnSilentDisk(t *testing.T) {
	t.Parallel()
	answers := make(chan struct{})
	defer close(answers)
	h := start(t, options{config: func(cfg *nds.Config) {
		cfg.Refresh = func(n nds.Node) (nds.Node, error) {
			<-answers
			return n, nil
		}
	}})
	h.wantLog("level=WARN", "no stream to the control plane", "reading the addresses and labels of this node: the disk has not answered")
	promptly(t, "the end", 10*time.Second, h.stop)
}

// C7: if the disk of the snapshot does not answer, pushes are used.
func TestSnapshotOnSilentDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	silentFile(t, filepath.Join(dir, "nametable.snapshot"))
	h := start(t, options{config: stateDir(dir)})
	h.server.Push(hosts("a.example.com"))
	h.wantApplied(plain(t, hosts("a.example.com")))
	h.wantACK("v1")
	h.wantLog("level=WARN", "snapshot of the table not read", "the disk has not answered")
	promptly(t, "the end", 10*time.Second, h.stop)
}

// C7: a disk that does not answer when a snapshot is written delays the end by a limited time.
func TestEndWithoutDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "nametable.snapshot")
	h := start(t, options{config: stateDir(dir)})
	h.server.Push(hosts("a.example.com"))
	h.wantApplied(plain(t, hosts("a.example.com")))
	h.wantACK("v1")
	h.wantSaved(path)
	if err := os.Rename(silentFile(t, filepath.Join(dir, "pipe")), path); err != nil {
		t.Fatal(err)
	}
	h.server.Push(hosts("a.example.com")) // its time is written to the file that is there
	h.wantACK("v2")
	promptly(t, "the end", 10*time.Second, h.stop)
	h.wantLog("level=WARN", "ending while a disk does not answer")
	reader, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = reader.Close()
}
