package discovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	defaultDebounce = 30 * time.Millisecond
	// maxQuietPeriods bounds, in debounce periods, how long continuous edits can delay a
	// read.
	maxQuietPeriods = 10
	// rescanEvery is when the directory is read without an event. It catches what the
	// kernel does not report: network file systems, and a parent directory that was
	// replaced.
	rescanEvery = 30 * time.Second
	// retryEvery is when a directory that could not be read or watched is read again.
	retryEvery = time.Second
)

// watchList holds the directories to watch, with links resolved.
type watchList map[string]watchEntry

// watchEntry says which events of a directory matter. A directory that only holds a link
// to a part of the configuration is watched for the name of the link.
type watchEntry struct {
	id    fileID
	all   bool            // every event matters
	names map[string]bool // otherwise, events of these names
}

// add watches a directory for all events.
func (l watchList) add(resolved string, info fs.FileInfo) {
	l[resolved] = watchEntry{id: idOf(info), all: true}
}

// addName watches a directory for events of one name.
func (l watchList) addName(dir, name string) {
	info, err := os.Stat(dir)
	if err != nil {
		return // the walk reports what cannot be read
	}
	e := l[dir]
	e.id = idOf(info)
	if e.names == nil {
		e.names = map[string]bool{}
	}
	e.names[name] = true
	l[dir] = e
}

// addTarget watches the target of a file that is a link, because the target may be
// written without touching the link.
func (l watchList) addTarget(path string) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeSymlink == 0 {
		return
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		l.addName(filepath.Dir(resolved), filepath.Base(resolved))
	}
}

// addLinks watches every link on the way to path, so that a link that is pointed
// elsewhere is noticed.
func (l watchList) addLinks(path string) {
	const maxLinks = 40 // as in the kernel
	path, err := filepath.Abs(path)
	for range maxLinks {
		if err != nil {
			return
		}
		var link string
		if link = firstLink(path); link == "" {
			return
		}
		l.addName(filepath.Dir(link), filepath.Base(link))
		var target string
		if target, err = os.Readlink(link); err == nil {
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(link), target)
			}
			path = filepath.Join(target, strings.TrimPrefix(path, link))
		}
	}
}

// firstLink returns the shortest prefix of path that is a link, or "".
func firstLink(path string) string {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != filepath.Separator {
			continue
		}
		if info, err := os.Lstat(path[:i]); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return path[:i]
		}
	}
	return ""
}

// watcher tells when the directory may have changed. It belongs to one goroutine. While
// the kernel refuses to watch, it only waits for the time of the next read.
type watcher struct {
	fs      *fsnotify.Watcher // nil while the kernel refuses
	quiet   time.Duration
	watched watchList
}

func newWatcher(quiet time.Duration) *watcher {
	return &watcher{quiet: quiet, watched: watchList{}}
}

func (w *watcher) close() {
	if w.fs != nil {
		_ = w.fs.Close() // it is not used again
	}
}

// giveUp closes an fsnotify watcher that has failed. The next sync makes another one.
func (w *watcher) giveUp() {
	w.close()
	w.fs, w.watched = nil, watchList{}
}

// sync watches the directories in want, and no others. It reports whether a watch is new;
// the caller then reads again, because changes before the watch was in place were not
// noticed. It continues after an error, and the next sync tries again.
func (w *watcher) sync(want watchList) (bool, error) {
	if w.fs == nil {
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			return false, fmt.Errorf("watching files%s; until then they are read every %v: %w", kernelLimit(err), retryEvery, err)
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
			_ = w.fs.Remove(dir) // the previous directory, which may be gone
			delete(w.watched, dir)
		}
		switch err := w.fs.Add(dir); {
		case errors.Is(err, fs.ErrNotExist):
			added = true // it was removed after the walk: read again
			continue
		case err != nil:
			errs = append(errs, fmt.Errorf("watching %s%s; until then it is read every %v: %w", dir, kernelLimit(err), retryEvery, err))
			continue
		}
		w.watched[dir], added = e, true
	}
	for dir := range w.watched {
		if _, ok := want[dir]; !ok {
			_ = w.fs.Remove(dir) // if it was removed, the kernel dropped the watch itself
			delete(w.watched, dir)
		}
	}
	if len(errs) > 0 {
		return added, errs[0] // the others have the same reason
	}
	return added, nil
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

// forget drops all watches, so that the next sync sets them again. A directory that was
// removed and created again has lost its watch.
func (w *watcher) forget() {
	for dir := range w.watched {
		_ = w.fs.Remove(dir) // the directory may have been removed
		delete(w.watched, dir)
	}
}

// matters reports whether an event can change what a walk finds.
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

// wait returns when something has changed and then was quiet, when atMost has passed, or
// when ctx ends.
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
			// Events were lost, so everything has to be read.
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
