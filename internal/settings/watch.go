package settings

import (
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"github.com/spf13/pflag"
)

// emptySettle is how long a file that had text must be empty or absent before that counts. A command whose output goes to
// a file empties the file first, and writes to it later.
const emptySettle = 5 * time.Second

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

// A Watcher finds changes of regular files. Its method Changed is for [clock.Clock.Poll].
//
// It reads the files and compares the bytes, for the same reasons as resolvconf.Watcher: there is no event if a mount
// covers a file, or if a file changes below an overlayfs, and a reading does not depend on how the file was replaced.
// Reading a file of 1 KiB costs some 10 µs, and an absent file 1 µs.
type Watcher struct {
	Files []string

	mu         sync.Mutex
	used, last map[string]string // the texts of the files when Note was last called, and when Changed was
	since      time.Time         // when last was read first
}

// Note says that the files are read now: changes are those from now on.
func (w *Watcher) Note() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = readFiles(w.Files)
}

// Changed reports whether the files differ from those at the last call of Note. A change counts when two looks have found
// it, because a program may still be writing.
func (w *Watcher) Changed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := readFiles(w.Files); !maps.Equal(now, w.last) {
		w.last, w.since = now, time.Now()
		return false
	}
	for path, used := range w.used {
		if used != "" && w.last[path] == "" {
			return time.Since(w.since) >= emptySettle
		}
	}
	return !maps.Equal(w.last, w.used)
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
