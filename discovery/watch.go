package discovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	defaultDebounce = 30 * time.Millisecond
	// maxQuietPeriods bounds how long a stream of edits can hold back a build.
	maxQuietPeriods = 10
	// rescanEvery catches what the kernel does not report: network file
	// systems, and a directory above that was replaced.
	rescanEvery = 30 * time.Second
	// retryEvery is how soon a directory is read again that could not be read,
	// or cannot be watched.
	retryEvery = time.Second
)

// watcher says when the directory may have changed. It belongs to one
// goroutine. Where the kernel has no watch to give, it only keeps the time.
type watcher struct {
	fs      *fsnotify.Watcher // nil while there is none to be had
	quiet   time.Duration
	watched watchList
}

func newWatcher(quiet time.Duration) *watcher {
	return &watcher{quiet: quiet, watched: watchList{}}
}

func (w *watcher) close() {
	if w.fs != nil {
		_ = w.fs.Close() // nothing is left to be done about it
	}
}

// giveUp drops a watcher that has failed. The next sync makes another.
func (w *watcher) giveUp() {
	w.close()
	w.fs, w.watched = nil, watchList{}
}

// sync watches what want says. It reports whether a watch is new: what was
// written there before the watch was in place has gone unnoticed. It goes on
// after an error, and the next sync tries again.
func (w *watcher) sync(want watchList) (bool, error) {
	if w.fs == nil {
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			return false, fmt.Errorf("watching files%s; until then they are read every %v: %w", bound(err), retryEvery, err)
		}
		w.fs = watcher
	}
	added := false
	var errs []error
	for dir, e := range want {
		old, ok := w.watched[dir]
		if ok && old.id == e.id {
			w.watched[dir] = e
			continue
		}
		if ok {
			_ = w.fs.Remove(dir) // the directory of before, which may be gone
			delete(w.watched, dir)
		}
		switch err := w.fs.Add(dir); {
		case errors.Is(err, fs.ErrNotExist):
			added = true // it has gone since it was read: read again
			continue
		case err != nil:
			errs = append(errs, fmt.Errorf("watching %s%s; until then it is read every %v: %w", dir, bound(err), retryEvery, err))
			continue
		}
		w.watched[dir], added = e, true
	}
	for dir := range w.watched {
		if _, ok := want[dir]; !ok {
			_ = w.fs.Remove(dir) // it is gone: the kernel dropped the watch itself
			delete(w.watched, dir)
		}
	}
	if len(errs) > 0 {
		return added, errs[0] // the others have the same reason
	}
	return added, nil
}

// bound names the setting of the kernel that an error comes from, if it comes from one.
func bound(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return " (fs.inotify.max_user_watches bounds it)"
	case errors.Is(err, syscall.EMFILE):
		return " (fs.inotify.max_user_instances, or the limit of open files, bounds it)"
	}
	return ""
}

// forget drops all watches. A directory that was removed and made again under
// its name has lost its watch, so after such an event they are set anew.
func (w *watcher) forget() {
	for dir := range w.watched {
		_ = w.fs.Remove(dir) // may be gone already
		delete(w.watched, dir)
	}
}

// matters reports whether an event can change what a reading finds.
func (w *watcher) matters(e fsnotify.Event) bool {
	if _, watched := w.watched[e.Name]; watched && (e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename)) {
		w.forget()
		return true
	}
	if e.Op == fsnotify.Chmod {
		return false
	}
	parent, ok := w.watched[filepath.Dir(e.Name)]
	return !ok || parent.all || parent.names[filepath.Base(e.Name)]
}

// wait returns when something changed and has been quiet since, or when atMost
// has passed, or when ctx ends.
func (w *watcher) wait(ctx context.Context, atMost time.Duration) {
	rescan := time.NewTimer(atMost)
	defer rescan.Stop()
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w.fs != nil {
		events, errs = w.fs.Events, w.fs.Errors
	}
	var quiet, deadline <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case e, ok := <-events:
			if !ok {
				w.giveUp()
				return
			}
			if !w.matters(e) {
				continue
			}
			quiet = time.After(w.quiet)
			if deadline == nil {
				deadline = time.After(maxQuietPeriods * w.quiet)
			}
		case err := <-errs:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				w.giveUp()
				return
			}
			// Events are lost, so look at everything.
			w.forget()
			return
		case <-quiet:
			return
		case <-deadline:
			return
		case <-rescan.C:
			return
		}
	}
}
