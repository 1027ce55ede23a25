package nds_test

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/nds"
)

// wantEnd ends the client, and checks how long that takes.
func (h *harness) wantEnd(want time.Duration) {
	h.t.Helper()
	began := time.Now()
	h.stop()
	if took := time.Since(began); took > want {
		h.t.Errorf("the end takes %v, want %v", took, want)
	}
}

// C5, R1: if the disk of the token does not answer, the error names the file, and neither the description of the token
// nor the end waits for the disk.
func TestTokenOnSilentDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startSecured(t)
		file := filepath.Join(t.TempDir(), "token")
		h := c.start(t, func(cfg *nds.Config) {
			cfg.TokenFile = file
			cfg.SilenceDisk(file)
		})
		h.wantLog("level=WARN", "no stream to the control plane", "reading the token (--xds-token-file): read "+file+": the disk has not answered for 2s")
		began := time.Now()
		for range 100 {
			if got := h.client.Token(); got.File != file {
				t.Errorf("%+v, want the file %s", got, file)
			}
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("Token takes %v", took)
		}
		h.wantEnd(0)
	})
}

// C5, R1: the same for the addresses and labels of the node.
func TestNodeOnSilentDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		defer close(answers)
		h := start(t, options{config: func(cfg *nds.Config) {
			cfg.Refresh = func(n nds.Node) (nds.Node, error) {
				<-answers
				return n, nil
			}
		}})
		h.wantLog("level=WARN", "no stream to the control plane", "reading the addresses and labels of this node: the disk has not answered")
		h.wantEnd(2 * time.Second)
	})
}

// C7: if the disk of the snapshot does not answer, pushes are used.
func TestSnapshotOnSilentDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := start(t, options{config: func(cfg *nds.Config) {
			cfg.StateDir = dir
			cfg.SilenceDisk(filepath.Join(dir, "nametable.snapshot"))
		}})
		h.server.Push(hosts("a.example.com"))
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.wantACK("v1")
		h.wantLog("level=WARN", "snapshot of the table not read", "the disk has not answered")
		h.wantEnd(0)
	})
}

// C7, R1: what does not end, as a write to a disk that does not answer, delays the end by a limited time.
func TestEndWithoutDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		defer close(answers)
		h := start(t, options{many: true, apply: func(map[int][]byte) error {
			<-answers
			return nil
		}})
		h.server.Push(hosts("a.example.com"))
		h.wantStatus(func(s nds.Status) bool { return s.Connected })
		h.wantEnd(3 * time.Second)
		h.wantLog("level=WARN", "ending while a disk does not answer")
	})
}
