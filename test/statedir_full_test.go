package test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/leftout"
)

// TestStartOnFullDisk checks that an agent starts, and answers, although the disk of its state directory is full.
func TestStartOnFullDisk(t *testing.T) { // C7
	t.Parallel()
	h := newHost(t)
	dir := filepath.Join(h.dir, "state")
	if err := errors.Join(os.Mkdir(dir, 0o700), syscall.Mount("none", dir, "tmpfs", 0, "size=64k,uid=1337,gid=1337,mode=700")); err != nil {
		leftout.Test(t, "a full file system: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	if err := os.WriteFile(filepath.Join(dir, "other"), make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	a := h.start("--state-dir", dir)
	if a.log.Count("the table cannot be saved") != 1 || !strings.Contains(h.get("/healthz/ready"), "ready") {
		t.Errorf("no warning, or not ready:\n%s", a.log)
	}
}
