package settings

import (
	"context"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/clock"
)

const (
	// watchSettle is how long the files must be unchanged before a change counts. A file that
	// is written in place is empty for a moment. A change is noticed after at most
	// [clock.Tick] plus watchSettle, which is 0.9 s.
	watchSettle = 100 * time.Millisecond
	// emptySettle replaces watchSettle if a file that had text is empty or absent now. A command whose output goes to
	// a file empties the file first, and writes to it later.
	emptySettle = 5 * time.Second
)

// Files returns the files that settings come from. They may be absent.
func Files(flags *pflag.FlagSet) []string {
	var files []string
	for _, name := range []string{ConfigFlag, MeshConfigFlag} {
		if flag := flags.Lookup(name); flag != nil && flag.Value.String() != "" {
			files = append(files, flag.Value.String())
		}
	}
	return files
}

// CheckRereadable returns an error if a file that settings come from can be read only once,
// such as a pipe. An absent file is no error.
func CheckRereadable(flags *pflag.FlagSet) error {
	for _, path := range Files(flags) {
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
			return fmt.Errorf("%s: want a regular file, because other kinds can be read only once", path)
		}
	}
	return nil
}

// A Watcher reports changes of files.
//
// It reads the files at each tick of its clock and compares the bytes, for the same reasons as
// resolvconf.Watcher: there is no event if a mount covers a file, or if a file changes below an
// overlayfs, and a reading does not depend on how the file was replaced. Reading a file of
// 1 KiB costs some 10 µs, and an absent file 1 µs (BenchmarkReadFiles).
type Watcher struct {
	// Clock says when to read the files. Default clock.New().
	Clock *clock.Clock

	files []string

	mu   sync.Mutex
	used map[string]string // the texts of the files at the last report; guarded by mu
}

// NewWatcher returns a Watcher for the changes from now on. It follows regular files only.
func NewWatcher(files []string) *Watcher { return &Watcher{files: files, used: readFiles(files)} }

// Note makes the Watcher compare with the present texts of the files from now on. Call it
// before the files are read for another reason than a report. Otherwise the Watcher would
// not report that a change was undone after the files were read.
func (w *Watcher) Note() {
	now := readFiles(w.files)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = now
}

// Run sends a value after every change until ctx ends.
func (w *Watcher) Run(ctx context.Context, changes chan<- struct{}) {
	if w.Clock == nil {
		w.Clock = clock.New()
	}
	look := func() bool {
		_, changed := w.compare(readFiles(w.files))
		return changed
	}
	for w.Clock.Await(ctx, clock.Tick, look) {
		if !w.settle(ctx) {
			continue
		}
		select {
		case changes <- struct{}{}:
		case <-ctx.Done():
		}
	}
}

// settle waits until the files have been unchanged for a while, because a program may still be writing them. Then it
// reports whether they differ from the last report.
func (w *Watcher) settle(ctx context.Context) bool {
	last, since := readFiles(w.files), time.Now()
	timer := time.NewTimer(watchSettle)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
		}
		now := readFiles(w.files)
		if !maps.Equal(now, last) {
			last, since = now, time.Now()
		}
		settle, changed := w.compare(now)
		if !changed {
			return false
		}
		if time.Since(since) >= settle {
			w.Note()
			return true
		}
		timer.Reset(watchSettle)
	}
}

// compare reports whether texts differ from the last report, and how long the difference must last before it is
// reported.
func (w *Watcher) compare(texts map[string]string) (settle time.Duration, changed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for path, used := range w.used {
		if used != "" && texts[path] == "" {
			return emptySettle, true
		}
	}
	return watchSettle, !maps.Equal(texts, w.used)
}

// readFiles returns the texts of the regular files. Files that cannot be read are left out.
func readFiles(files []string) map[string]string {
	texts := map[string]string{}
	for _, path := range files {
		if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
			continue
		}
		if text, err := os.ReadFile(path); err == nil {
			texts[path] = string(text)
		}
	}
	return texts
}
