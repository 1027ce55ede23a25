package settings_test

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/settings"
)

// Every kind of change is reported once: a file that is created, written in place, renamed
// over or removed, and a symbolic link above it that is replaced, as Kubernetes does. A file
// that is empty for a while, because it is being written, is reported with its text. While
// nothing changes, nothing is reported. A change that is undone after Note is reported.
func TestWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "current", "mesh")
		put := func(name, text string) {
			t.Helper()
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		link := func(target string) {
			t.Helper()
			next := filepath.Join(dir, "next")
			if err := os.Symlink(target, next); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, filepath.Join(dir, "current")); err != nil {
				t.Fatal(err)
			}
		}
		watcher := settings.Watcher{Files: []string{path, "/dev/zero"}}
		watcher.Note()
		changes, stop := clock.ForPolling(time.Second/2).Poll(time.Second/2, watcher.Changed)
		defer stop()
		for _, step := range []struct {
			name string
			late time.Duration
			do   func()
		}{
			{"made", time.Second, func() { put("a/mesh", "a"); link("a") }},
			{"written", time.Second, func() { put("a/mesh", "A") }},
			{"linked", time.Second, func() { put("b/mesh", "b"); link("b") }},
			{"renamed", time.Second, func() {
				put("b/next", "B")
				if err := os.Rename(filepath.Join(dir, "b/next"), filepath.Join(dir, "b/mesh")); err != nil {
					t.Fatal(err)
				}
			}},
			{"empty for a while", 4 * time.Second, func() {
				put("b/mesh", "")
				<-time.After(3 * time.Second)
				put("b/mesh", "C")
			}},
			{"empty", 7 * time.Second, func() { put("b/mesh", "") }},
			{"written again", time.Second, func() { put("b/mesh", "D") }},
			{"removed", 7 * time.Second, func() {
				if err := os.Remove(filepath.Join(dir, "b/mesh")); err != nil {
					t.Fatal(err)
				}
			}},
		} {
			began := time.Now()
			step.do()
			<-changes
			watcher.Note()
			if took := time.Since(began); took > step.late {
				t.Errorf("%s: reported after %v", step.name, took)
			}
		}
		put("b/mesh", "E")
		watcher.Note() // as before the files are read for a signal
		put("b/mesh", "")
		<-time.After(4 * time.Second)
		put("b/mesh", "E")
		select {
		case <-changes:
			t.Error("a change is reported although nothing changed")
		case <-time.After(time.Minute):
		}
		put("b/mesh", "F")
		watcher.Note()
		put("b/mesh", "E")
		<-changes
	})
}
