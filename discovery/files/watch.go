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

// rescanEvery is when the directory is read if no change is announced. It catches what the kernel does
// not report: network file systems, links, mounts, and a parent directory that was replaced.
const rescanEvery = time.Second

// A watcher announces changes in directories, so that they are read at once. It may miss some, such
// as changes in a network file system: the directories are read once a second, too. It belongs to
// one goroutine.
type watcher struct {
	fs    *fsnotify.Watcher // nil while nothing is watched
	root  string
	dirs  map[string]dir // that are watched, as in a tree
	stale bool           // they must be watched again
}

func (w *watcher) close() {
	if w.fs != nil {
		_ = w.fs.Close() // it is not used again
	}
	w.fs, w.dirs = nil, nil
}

// follow watches the directories of a tree, and no others. It continues after an error, and the next call
// tries again.
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
		if added := w.fs.Add(path); added != nil && !errors.Is(added, fs.ErrNotExist) { // one that was removed is read again
			err = fmt.Errorf("watching %s%s; it is read every %v: %w", path, kernelLimit(added), rescanEvery, added)
		}
	}
	w.dirs, w.stale = dirs, err != nil
	return err
}

// kernelLimit names the kernel's setting that an error comes from, if it does.
func kernelLimit(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return " (fs.inotify.max_user_watches is the limit)"
	case errors.Is(err, syscall.EMFILE):
		return " (fs.inotify.max_user_instances, or the limit of open files, is reached)"
	}
	return ""
}

// wait returns after a pause if something has changed since the last call, else when something changes,
// when atMost has passed, or when ctx ends.
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
			changed = changed || e.Op != fsnotify.Chmod // the next read in a second finds that, too
			// A directory that was removed and made again is not watched any more.
			w.stale = w.stale || e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename)
		case <-errs: //nolint:errcheck // events are lost, or all that follow: which one does not matter
			changed, w.stale, events, errs = true, true, nil, nil
		}
	}
}
