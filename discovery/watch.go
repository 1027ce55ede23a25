package discovery

import (
	"context"
	"fmt"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	defaultDebounce = 30 * time.Millisecond
	// maxQuietPeriods bounds how long a stream of edits can hold back a build.
	maxQuietPeriods = 10
	// rescanEvery catches what the kernel does not report: network file
	// systems, and the target of a link that lies elsewhere.
	rescanEvery = 30 * time.Second
	// retryEvery is how soon a directory that could not be read is read again.
	retryEvery = time.Second
)

// watcher says when the directory may have changed. It belongs to one
// goroutine.
type watcher struct {
	fs      *fsnotify.Watcher
	quiet   time.Duration
	watched map[string]bool
}

func newWatcher(quiet time.Duration) (*watcher, error) {
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watching files: %w", err)
	}
	return &watcher{fs: fs, quiet: quiet, watched: map[string]bool{}}, nil
}

func (w *watcher) close() error { return w.fs.Close() }

// sync watches exactly dirs. It reports whether one is new: what was written
// there before the watch was in place has gone unnoticed.
func (w *watcher) sync(dirs []string) (bool, error) {
	want := make(map[string]bool, len(dirs))
	added := false
	for _, dir := range dirs {
		want[dir] = true
		if w.watched[dir] {
			continue
		}
		if err := w.fs.Add(dir); err != nil {
			return added, fmt.Errorf("watching %s: %w", dir, err)
		}
		w.watched[dir], added = true, true
	}
	for dir := range w.watched {
		if !want[dir] {
			_ = w.fs.Remove(dir) // it is gone: the kernel dropped the watch itself
			delete(w.watched, dir)
		}
	}
	return added, nil
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
	if (e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename)) && w.watched[e.Name] {
		w.forget()
	}
	return e.Op != fsnotify.Chmod
}

// wait returns when something changed and has been quiet since, or when atMost
// has passed, or when ctx ends. It fails only if the watcher has died.
func (w *watcher) wait(ctx context.Context, atMost time.Duration) error {
	rescan := time.NewTimer(atMost)
	defer rescan.Stop()
	var quiet, deadline <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-w.fs.Events:
			if !ok {
				return fsnotify.ErrClosed
			}
			if !w.matters(e) {
				continue
			}
			quiet = time.After(w.quiet)
			if deadline == nil {
				deadline = time.After(maxQuietPeriods * w.quiet)
			}
		case _, ok := <-w.fs.Errors:
			if !ok {
				return fsnotify.ErrClosed
			}
			// An overflow: events are lost, so look at everything.
			w.forget()
			return nil
		case <-quiet:
			return nil
		case <-deadline:
			return nil
		case <-rescan.C:
			return nil
		}
	}
}
