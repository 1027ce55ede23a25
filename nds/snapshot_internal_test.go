package nds

import (
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// versionSaved returns the version in the snapshot of a directory; "" if there is none.
func versionSaved(t *testing.T, dir *statedir.Dir) string {
	t.Helper()
	synctest.Wait()
	data, err := os.ReadFile(dir.File(snapshotName))
	if err != nil {
		return ""
	}
	s, err := parseSnapshot(data)
	if err != nil {
		t.Fatal(err)
	}
	return s.version
}

// C7: a snapshot that could not be written is written when that is possible, and at the latest at the end: the
// next push may be far away.
func TestSaverTriesAgain(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]string{20 * time.Second: "v1", 19 * time.Second: ""} {
		synctest.Test(t, func(t *testing.T) {
			dir := statedir.New(t.TempDir(), lockName)
			path := dir.File(snapshotName)
			if err := os.MkdirAll(filepath.Join(path, "occupied"), 0o700); err != nil { // root cannot replace it either
				t.Fatal(err)
			}
			log := new(testlog.Buffer)
			s := newSnapshotSaver(dir, log.Logger(), new(state))
			stop := s.start()
			s.put(snapshot{owner: "o", version: "v1", shards: &shards{}, pushed: time.Now()}, true)
			synctest.Wait()
			if log.Count("not written") != 1 {
				t.Errorf("the failure is not logged:\n%s", log)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait) //nolint:forbidigo // the bubble's clock
			if got := versionSaved(t, dir); got != want {
				t.Errorf("after %v: %q", wait, got)
			}
			if stop(); versionSaved(t, dir) != "v1" {
				t.Errorf("at the end: %q", versionSaved(t, dir))
			}
		})
	}
}

// C7: the first table is saved at once, later ones at most every 10 s. A push that changes nothing is saved at the end.
func TestSaverPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := statedir.New(t.TempDir(), lockName)
		s := newSnapshotSaver(dir, slog.New(slog.DiscardHandler), new(state))
		stop := s.start()
		written := map[string]bool{}
		for i := range 25 {
			s.put(snapshot{version: strconv.Itoa(i), shards: &shards{}}, true)
			written[versionSaved(t, dir)] = true
			time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock
		}
		if len(written) != 3 || !written["0"] {
			t.Errorf("written: %v", written)
		}
		time.Sleep(time.Minute) //nolint:forbidigo // the bubble's clock
		s.put(snapshot{version: "unchanged", shards: &shards{}}, false)
		time.Sleep(time.Minute) //nolint:forbidigo // the bubble's clock
		if got := versionSaved(t, dir); got != "24" {
			t.Errorf("after the last change: %q", got)
		}
		if stop(); versionSaved(t, dir) != "unchanged" {
			t.Errorf("at the end: %q", versionSaved(t, dir))
		}
	})
}

// C7: a snapshot that can never be written is not logged every minute.
func TestSaverBacksOff(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, nil, 0o600); err != nil { // no directory
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		log := new(testlog.Buffer)
		s := newSnapshotSaver(statedir.New(path, lockName), log.Logger(), new(state))
		stop := s.start()
		s.put(snapshot{owner: "o", shards: &shards{}, pushed: time.Now()}, true)
		time.Sleep(24 * time.Hour) //nolint:forbidigo // the bubble's clock
		stop()
		if n := log.Count("not written"); n < 24 || n > 60 {
			t.Errorf("%d lines in a day:\n%s", n, log)
		}
	})
}
