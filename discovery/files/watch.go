package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// rescanEvery is how often the directory is read if no change is announced. These reads find changes that the kernel
// does not report: in network file systems, of links and mounts, and of a parent directory that was replaced.
const rescanEvery = time.Second

// A watcher announces changes in directories, which are then read at once. It may miss changes, such as changes in a
// network file system, so the directories are also read once a second. A watcher belongs to one goroutine.
type watcher struct {
	fs    *fsnotify.Watcher // nil while nothing is watched
	root  string
	dirs  map[string]dir // the watched directories, as in a tree
	stale bool           // the directories must be watched again
}

func (w *watcher) close() {
	if w.fs != nil {
		_ = w.fs.Close() // w.fs is not used again
	}
	w.fs, w.dirs = nil, nil
}

// follow watches the directories dirs of a tree, and no others. After an error it goes on with the other directories,
// and the next call tries again.
func (w *watcher) follow(dirs map[string]dir) error {
	if !w.stale && maps.Equal(w.dirs, dirs) {
		return nil
	}
	w.close()
	w.stale = true
	var err error
	if w.fs, err = fsnotify.NewWatcher(); err != nil {
		return fmt.Errorf("watching files%s; they are read every %v: %w", kernelLimit(err), rescanEvery, err)
	}
	for rel := range dirs {
		path := filepath.Join(w.root, filepath.FromSlash(rel))
		if added := w.fs.Add(path); added != nil && !errors.Is(added, fs.ErrNotExist) { // the next read does not find a directory that was removed
			err = fmt.Errorf("watching %s%s; it is read every %v: %w", path, kernelLimit(added), rescanEvery, added)
		}
	}
	w.dirs, w.stale = dirs, err != nil
	return err
}

// kernelLimit returns a text that names the kernel's limit that has caused err; "" if no limit has caused it.
func kernelLimit(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return " (fs.inotify.max_user_watches is the limit)"
	case errors.Is(err, syscall.EMFILE):
		return " (fs.inotify.max_user_instances, or the limit of open files, is reached)"
	}
	return ""
}

// wait waits for the time pause, and then until a directory changes, unless one has changed since the last call. It
// returns early when ctx ends, and at the latest after pause or atMost, whichever is longer.
func (w *watcher) wait(ctx context.Context, pause, atMost time.Duration) {
	paused, rescan := time.NewTimer(pause), time.NewTimer(max(pause, atMost))
	defer paused.Stop()
	defer rescan.Stop()
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w.fs != nil {
		events, errs = w.fs.Events, w.fs.Errors
	}
	pausing, changed := true, false
	for pausing || !changed {
		select {
		case <-ctx.Done():
			return
		case <-rescan.C:
			return
		case <-paused.C:
			pausing = false
		case e := <-events:
			changed = changed || e.Op != fsnotify.Chmod // a change of mode alone is found by the read that comes within a second
			// A directory that was removed and made again is not watched any more.
			w.stale = w.stale || e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename)
		case <-errs: //nolint:errcheck // some or all events are lost: the error does not matter
			changed, w.stale, events, errs = true, true, nil, nil
		}
	}
}
