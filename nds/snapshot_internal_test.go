package nds

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// C7: a snapshot that could not be written is written when that is possible, and at the latest at the end: the
// next push may be far away.
func TestSaverTriesAgain(t *testing.T) {
	t.Parallel()
	for _, wait := range []time.Duration{saveAgain, time.Second} { // until the end
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
			if written := err == nil && len(data) > snapshotHead; written != (wait == saveAgain) {
				t.Errorf("after %v: %d bytes, %v", wait, len(data), err)
			}
			stop()
			if data, err = os.ReadFile(path); err != nil || len(data) <= snapshotHead {
				t.Errorf("at the end: %d bytes, %v", len(data), err)
			}
		})
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
