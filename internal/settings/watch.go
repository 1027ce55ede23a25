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
	// settle is how long a change must last before it counts, because a program may still be writing.
	settle = 100 * time.Millisecond
	// emptySettle is how long a file that had text must be empty or absent before that counts. A command whose output goes to
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
// It reads the files at each tick of its clock and compares the bytes, for the same reasons as resolvconf.Watcher: there is no
// event if a mount covers a file, or if a file changes below an overlayfs, and a reading does not depend on how the file was
// replaced. Reading a file of 1 KiB costs some 10 µs, and an absent file 1 µs.
type Watcher struct {
	Clock *clock.Clock // says when to read the files

	files []string

	mu   sync.Mutex
	used map[string]string // the texts of the files at the last report; guarded by mu
}

// NewWatcher returns a Watcher for the changes from now on. It follows regular files only.
func NewWatcher(files []string) *Watcher {
	return &Watcher{Clock: clock.New(), files: files, used: readFiles(files)}
}

// Note makes the Watcher compare with the present texts of the files from now on. Call it before the files are read for
// another reason than a report. Otherwise the Watcher would not report that a change was undone after the files were read.
func (w *Watcher) Note() {
	now := readFiles(w.files)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = now
}

// Run sends a value after every change until ctx ends: within a second.
func (w *Watcher) Run(ctx context.Context, changes chan<- struct{}) {
	last, since := readFiles(w.files), time.Now()
	look := func() bool {
		now := readFiles(w.files)
		if !maps.Equal(now, last) {
			last, since = now, time.Now()
		}
		return w.changed(now, time.Since(since))
	}
	for w.Clock.Await(ctx, clock.Tick, look) && clock.Sleep(ctx, settle) {
		if !maps.Equal(readFiles(w.files), last) {
			continue
		}
		w.Note()
		select {
		case changes <- struct{}{}:
		case <-ctx.Done():
		}
	}
}

// changed reports whether texts, which have lasted for a while, differ from the last report.
func (w *Watcher) changed(texts map[string]string, lasted time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for path, used := range w.used {
		if used != "" && texts[path] == "" {
			return lasted >= emptySettle
		}
	}
	return !maps.Equal(texts, w.used)
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
