package nds

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// C7: a snapshot that could not be written is written when that is possible, and at the latest at the end: the
// next push may be far away.
func TestSaverTriesAgain(t *testing.T) {
	t.Parallel()
	for _, wait := range []time.Duration{30 * time.Second, 29 * time.Second} { // until the end
		synctest.Test(t, func(t *testing.T) {
			dir := statedir.New(t.TempDir(), lockName)
			path := dir.File(snapshotName)
			if err := os.MkdirAll(filepath.Join(path, "occupied"), 0o700); err != nil { // root cannot replace it either
				t.Fatal(err)
			}
			log := new(testlog.Buffer)
			s := newSnapshotSaver(dir, log.Logger())
			stop := s.start()
			s.put(snapshot{owner: "o", table: &hostTable{}, pushed: time.Now()}, tableDiff{all: true})
			synctest.Wait()
			if log.Count("not written") != 1 {
				t.Errorf("the failure is not logged:\n%s", log)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait) //nolint:forbidigo // the bubble's clock
			synctest.Wait()
			data, err := os.ReadFile(path)
			if written := err == nil && len(data) > snapshotHead; written != (wait == 30*time.Second) {
				t.Errorf("after %v: %d bytes, %v", wait, len(data), err)
			}
			stop()
			if data, err = os.ReadFile(path); err != nil || len(data) <= snapshotHead {
				t.Errorf("at the end: %d bytes, %v", len(data), err)
			}
		})
	}
}

// C7: a disk that does not answer delays no push. What was pushed meanwhile is saved when it answers again.
func TestSlowDisk(t *testing.T) {
	t.Parallel()
	dir := statedir.New(t.TempDir(), lockName)
	path, pipe := dir.File(snapshotName), dir.File("pipe")
	s := newSnapshotSaver(dir, slog.New(slog.DiscardHandler))
	stop := s.start()
	put := func(version string, diff tableDiff) {
		s.put(snapshot{owner: "o", version: version, table: &hostTable{}, pushed: time.Now()}, diff)
	}
	taken := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.next == nil
	}
	put("v1", tableDiff{all: true})
	wait.Until(t, "the snapshot is saved", func() bool { _, err := os.Stat(path); return err == nil })
	// Opening a named pipe for writing blocks until there is a reader. A push that changes nothing writes its time to
	// the file that is there.
	if err := errors.Join(unix.Mkfifo(pipe, 0o600), os.Link(pipe, path+".new"), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
	put("v1", tableDiff{})
	wait.Until(t, "the disk is asked", taken)
	put("v2", tableDiff{all: true})
	put("v3", tableDiff{all: true})
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	stop()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if saved, err := parseSnapshot(data); err != nil || saved.version != "v3" {
		t.Errorf("saved %q, %v", saved.version, err)
	}
}

// C7, C11: the log of changes is bounded. When it is full, the snapshot is written again.
func TestSnapshotLogIsBounded(t *testing.T) {
	t.Parallel()
	s := newSnapshotSaver(statedir.New(t.TempDir(), lockName), slog.New(slog.DiscardHandler))
	defer s.dir.Unlock()
	table := &hostTable{mode: ModeHosts}
	s.put(snapshot{table: table, pushed: time.Now()}, tableDiff{all: true})
	s.saveNext()
	whole, again := s.length, 0
	for range 200 {
		s.put(snapshot{table: table, pushed: time.Now()}, tableDiff{change: make([]byte, 1000)})
		s.saveNext()
		info, err := os.Stat(s.dir.File(snapshotName))
		if err != nil || info.Size() != s.length || s.length > whole+minLog {
			t.Fatalf("a snapshot of %d bytes, %v", s.length, err)
		}
		if s.length == whole {
			again++
		}
	}
	if again < 200*1000/minLog {
		t.Errorf("written again %d times", again)
	}
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
		s := newSnapshotSaver(statedir.New(path, lockName), log.Logger())
		stop := s.start()
		s.put(snapshot{owner: "o", table: &hostTable{}, pushed: time.Now()}, tableDiff{all: true})
		time.Sleep(24 * time.Hour) //nolint:forbidigo // the bubble's clock
		stop()
		if n := log.Count("not written"); n < 24 || n > 60 {
			t.Errorf("%d lines in a day:\n%s", n, log)
		}
	})
}

// C7, C11: changes that wait for a disk are bounded: instead of many of them, the table is written.
func TestPendingChangesAreBounded(t *testing.T) {
	t.Parallel()
	s := newSnapshotSaver(statedir.New(t.TempDir(), lockName), slog.New(slog.DiscardHandler))
	change := make([]byte, 1000)
	most := 0
	for range 3 * maxPending / len(change) {
		s.put(snapshot{table: &hostTable{}}, tableDiff{change: change})
		most = max(most, len(s.changes))
	}
	if !s.writeWhole || len(s.changes) > 0 || most > maxPending/len(change)+1 {
		t.Errorf("%d changes are waiting, at most %d", len(s.changes), most)
	}
}
