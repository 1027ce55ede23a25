package nds

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	lockName     = "nametap.lock"
	snapshotName = "nametable.snapshot"
)

// A tableDiff says how the table in use differs from the table that the snapshotSaver got last.
type tableDiff struct {
	all    bool   // the table must be saved whole, because the field change cannot say how it differs
	change []byte // the change by which the table differs, a NameTable in wire form; nil for none
}

// A snapshotSaver writes snapshots in its own goroutine. So a disk that is slow or does not answer delays no push.
type snapshotSaver struct {
	dir  *statedir.Dir
	wake chan struct{} // wakes run after put

	mu         sync.Mutex
	next       *snapshot // the snapshot to write; nil if there is nothing new
	writeWhole bool      // next must be written whole, because the changes do not lead to its table
	// The field changes has the changes that put was given since the last call of saveNext. It is nil if writeWhole is
	// true. The field size is the total length of these changes in bytes, at most maxPending.
	changes []record
	size    int
	failure string // why the last write failed; "" if it succeeded

	// The fields below are owned by the goroutine of run.

	// unsaved is true if the file does not have the table of the last snapshot.
	unsaved bool
	// The file ends with a log of changes (snapshotfile.go). base is the length of the file up to the log, and length
	// is the length of the whole file. base is 0 if changes cannot be added to the file, for example because this
	// saver has not written it.
	base, length int64
	failures     logonce.Log
}

func newSnapshotSaver(dir *statedir.Dir, log *slog.Logger) *snapshotSaver {
	return &snapshotSaver{dir: dir, wake: make(chan struct{}, 1), failures: logonce.New(log)}
}

// start runs the saver. The function stop ends it, and waits until the last snapshot is written and the directory is
// unlocked.
func (s *snapshotSaver) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(ctx)
		s.dir.Unlock()
	}()
	return func() {
		cancel()
		<-done
	}
}

// maxPending bounds the changes that wait for a slow disk.
const maxPending = 1 << 20

// put makes the parameter next the snapshot to write. diff says how its table differs from the table of the last
// put.
func (s *snapshotSaver) put(next snapshot, diff tableDiff) {
	s.mu.Lock()
	s.next, s.writeWhole = &next, s.writeWhole || diff.all
	if diff.change != nil {
		s.changes = append(s.changes, record{pushed: next.pushed, version: next.version, change: diff.change})
		s.size += len(diff.change)
	}
	if s.writeWhole = s.writeWhole || s.size > maxPending; s.writeWhole {
		s.changes, s.size = nil, 0
	}
	s.mu.Unlock()
	chans.Wake(s.wake)
}

// After a failure, the saver retries at the next push. If no push comes, it retries after a pause. The pause is
// saveAgain at first. If the retry after the pause fails, the cause may last, so the next pause is twice as long, up to
// maxSaveAgain. A push restarts the pause without doubling it.
const (
	saveAgain    = 30 * time.Second
	maxSaveAgain = 30 * time.Minute
)

// run writes snapshots until ctx ends, and then writes the last snapshot.
func (s *snapshotSaver) run(ctx context.Context) {
	for failures := 0; ; {
		var retry <-chan time.Time
		if s.unsaved {
			retry = time.After(clock.BackOff(failures, saveAgain, maxSaveAgain))
		} else {
			failures = 0
		}
		select {
		case <-s.wake:
			s.saveNext()
		case <-retry:
			s.saveNext()
			failures++
		case <-ctx.Done():
			s.saveNext()
			return
		}
	}
}

// saveNext writes the snapshot in s.next. If the file already has its table, saveNext writes only the time of the
// push. If changes can be added to the file, it writes only the changes. Otherwise it writes the whole snapshot.
// If that fails, the next call writes the whole snapshot.
func (s *snapshotSaver) saveNext() {
	s.mu.Lock()
	next, changes := s.next, s.changes
	s.unsaved = s.unsaved || s.writeWhole
	s.next, s.writeWhole, s.changes, s.size = nil, false, nil, 0
	s.mu.Unlock()
	switch {
	case next == nil:
		return
	case s.unsaved:
	case len(changes) == 0 && s.saveTime(next.pushed) == nil:
		return
	case len(changes) > 0 && s.saveChanges(changes) == nil:
		s.succeeded()
		return
	}
	parts, err := next.marshal()
	if err == nil {
		err = s.dir.Write(snapshotName, parts...)
	}
	if err != nil {
		s.unsaved = true
		s.mu.Lock()
		s.failure = err.Error()
		if s.next == nil {
			s.next = next
		}
		s.mu.Unlock()
		s.failures.Report("snapshot of the table not written: the agent may start with an older table", slog.LevelWarn, err)
		return
	}
	s.succeeded()
	s.unsaved, s.base, s.length = false, 0, int64(totalLen(parts))
	if next.table.mode == ModeHosts {
		s.base = s.length
	}
}

// succeeded records that the snapshot was written.
func (s *snapshotSaver) succeeded() {
	s.failures.Reset()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failure = ""
}

// lastFailure returns why the last write failed, or "" if it succeeded.
func (s *snapshotSaver) lastFailure() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// saveTime writes the time of the last push to the file.
func (s *snapshotSaver) saveTime(pushed time.Time) error {
	return s.dir.WriteAt(snapshotName, binary.BigEndian.AppendUint64(nil, uint64(pushed.UnixNano())), int64(len(snapshotMagic)))
}

// errNoRoom is returned if the changes do not fit in the log. Then the file must be written whole.
var errNoRoom = errors.New("the changes in the snapshot of the table are too long")

// saveChanges adds changes to the file. It does not wait until the changes are on the disk: if the last changes are
// missing after a power failure, the control plane sends them again.
func (s *snapshotSaver) saveChanges(changes []record) error {
	var data []byte
	for i := range changes {
		data = changes[i].append(data)
	}
	if s.base == 0 || s.length-s.base+int64(len(data)) > max(s.base/2, minLog) {
		return errNoRoom
	}
	err := s.dir.Append(snapshotName, data, s.length)
	s.length += int64(len(data))
	return err
}
