package test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// hold keeps processes that open a file of a directory waiting, as a disk that does not answer does, until the function
// release is called. The channel held has a value for each.
func hold(t *testing.T, dir string) (held <-chan struct{}, release func()) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY)
	if err == nil {
		err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM|unix.FAN_EVENT_ON_CHILD, unix.AT_FDCWD, dir)
	}
	if err != nil {
		leftout.Test(t, "holding what opens a file (fanotify): %v", err)
	}
	waiting, group := make(chan struct{}, 100), os.NewFile(uintptr(fd), "fanotify")
	go func() {
		// What is read has descriptors of the files, which stay open: they are few.
		for buffer := make([]byte, 4096); ; waiting <- struct{}{} {
			if _, err := group.Read(buffer); err != nil {
				return
			}
		}
	}()
	// The kernel lets all go on when the group ends.
	release = func() { _ = group.Close() }
	t.Cleanup(release)
	return waiting, release
}

// TestSlowDisk checks that a disk that does not answer delays neither pushes nor answers, and gets the last table when it
// answers again.
func TestSlowDisk(t *testing.T) { // C7
	t.Parallel()
	h := newHost(t)
	dir := h.agentDir("state")
	snapshot := filepath.Join(dir, "nametable.snapshot")
	has := func(address string) func() bool {
		return func() bool {
			data, err := os.ReadFile(snapshot)
			return err == nil && bytes.Contains(data, []byte(address))
		}
	}
	a := h.start("--state-dir", dir)
	wait.Until(t, "the first table is saved", has("10.1.0.1"))
	held, release := hold(t, dir)
	for _, address := range []string{"10.1.0.2", "10.1.0.3", "10.1.0.4"} {
		h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
			"web.shop.svc.cluster.local": {Ips: []string{address}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		}})
		wait.Until(t, "the push is in use", func() bool { return h.dig("@127.0.0.1", "-p", "15053", "web.shop.svc.cluster.local") == address })
		if address == "10.1.0.2" {
			wait.For(t, "the agent saves it", held)
		}
	}
	if _, err := h.xds.WaitAnswer(t.Context(), "v4"); err != nil {
		t.Error(err)
	}
	release()
	a.end(os.Interrupt)
	if !has("10.1.0.4")() {
		t.Error("the last table is not saved")
	}
}
