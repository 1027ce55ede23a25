package nds

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// C7: a disk that does not answer delays the end by a limited time. The file is a named
// pipe: opening it for writing blocks until there is a reader.
func TestSaverEndsWithoutDisk(t *testing.T) {
	dir := statedir.New(t.TempDir(), lockName)
	path := dir.File(snapshotName)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	log := new(testlog.Buffer)
	s := newSnapshotSaver(dir, slog.New(slog.NewTextHandler(log, nil)))
	s.timeout = 10 * time.Millisecond
	stop := s.start()
	s.put(snapshot{pushed: time.Now()}, false)
	stop()
	if log.Count("the disk does not answer") != 1 {
		t.Errorf("the log has\n%s", log)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // lets the saver go on
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	s.timeout = time.Minute
	stop()
	if got, err := os.ReadFile(path); err != nil || len(got) < snapshotHead || log.Count("does not answer") != 1 {
		t.Errorf("the snapshot has %d bytes, %v, the log has\n%s", len(got), err, log)
	}
}
