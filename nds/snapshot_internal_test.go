package nds

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// C7: a snapshot that could not be written is written when that is possible, and at the latest at the end: the
// next push may be far away.
func TestSaverTriesAgain(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		again time.Duration
		end   bool
	}{"after a while": {again: time.Millisecond}, "at the end": {again: time.Hour, end: true}} {
		t.Run(name, func(t *testing.T) {
			dir := statedir.New(t.TempDir(), lockName)
			path := dir.File(snapshotName)
			if err := os.MkdirAll(filepath.Join(path, "occupied"), 0o700); err != nil { // root cannot replace it either
				t.Fatal(err)
			}
			log := new(testlog.Buffer)
			s := newSnapshotSaver(dir, slog.New(slog.NewTextHandler(log, nil)))
			s.retryPause = tc.again
			stop := sync.OnceFunc(s.start())
			defer stop()
			s.put(snapshot{owner: "o", table: &hostTable{}, pushed: time.Now()}, tableDiff{all: true})
			wait.Until(t, "the failure is logged", func() bool { return log.Count("not written") == 1 })
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if tc.end {
				stop()
			}
			wait.Until(t, "the snapshot is written", func() bool {
				data, err := os.ReadFile(path)
				return err == nil && len(data) > snapshotHead
			})
		})
	}
}

// C7, C11: a snapshot of hosts is written without a copy of the table, which would be garbage of twice its size.
func TestSnapshotIsNotCopied(t *testing.T) {
	var hosts []string
	for i := range 20_000 {
		hosts = append(hosts, fmt.Sprintf("web-%d.shop.svc.cluster.local", i))
	}
	c, err := parseChange(testChange(t, &hostTable{}, testEntries(t, hosts...), &api.NameTable_Change{}))
	if err != nil {
		t.Fatal(err)
	}
	table, err := new(hostTable).apply(&c)
	if err != nil {
		t.Fatal(err)
	}
	s := newSnapshotSaver(statedir.New(t.TempDir(), lockName), slog.New(slog.DiscardHandler))
	var before, after runtime.MemStats
	for range 2 { // the first one also allocates what the process needs once
		s.put(snapshot{table: table, pushed: time.Now()}, tableDiff{all: true})
		runtime.ReadMemStats(&before)
		s.saveNext()
		runtime.ReadMemStats(&after)
	}
	if allocated := after.TotalAlloc - before.TotalAlloc; s.length < 1<<19 || allocated > uint64(s.length)/10 {
		t.Errorf("a snapshot of %d bytes allocates %d", s.length, allocated)
	}
	s.dir.Unlock()
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
		s := newSnapshotSaver(statedir.New(path, lockName), slog.New(slog.NewTextHandler(log, nil)))
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
