package test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestStartOnFullDisk checks that an agent and nametap-discovery start, and answer, although the disk of the state directory
// that their settings name is full.
func TestStartOnFullDisk(t *testing.T) { // C7, D18
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
	log := testlog.New(t)
	cmd := exec.Command(filepath.Join(planes.Dir(t), "nametap-discovery"), "--config-dir", "../examples/shop", "--state-dir", dir, "--grpc-addr", "127.0.0.1:0", "--http-addr=")
	cmd.Stdout, cmd.Stderr = log, log
	if err := h.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	wait.Until(t, "nametap-discovery serves, and says that it cannot save", func() bool {
		return log.Count("serving name tables") == 1 && log.Count("cannot save the last good objects") == 1
	})
}
