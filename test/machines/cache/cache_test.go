package cache_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nametap/nametap/test/machines/cache"
)

// TestDir builds a directory once for each recipe, whatever the number of callers.
func TestDir(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	var builds atomic.Int32
	build := func(dir string) error {
		builds.Add(1)
		return os.WriteFile(filepath.Join(dir, "file"), nil, 0o644)
	}
	dirs := make([]string, 8)
	var callers sync.WaitGroup
	for i := range dirs {
		callers.Go(func() {
			dir, err := cache.Dir("thing", []string{"recipe", []string{"a", "b"}[i%2]}, build)
			if err != nil {
				t.Error(err)
			}
			dirs[i] = dir
		})
	}
	callers.Wait()
	if builds.Load() != 2 || dirs[0] == dirs[1] || dirs[0] != dirs[2] {
		t.Errorf("%d builds in %v, want one for each of two recipes", builds.Load(), dirs)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "file")); err != nil {
			t.Error(err)
		}
	}
}

// TestDirFails leaves nothing of a build that fails, so the next call builds again.
func TestDirFails(t *testing.T) {
	top := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", top)
	cause := errors.New("no network")
	dir, err := cache.Dir("thing", nil, func(string) error { return cause })
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), top) || dir != "" {
		t.Errorf("Dir returns %q, %v, want an error that names the directory and has the cause", dir, err)
	}
	dir, err = cache.Dir("thing", nil, func(dir string) error {
		files, err := os.ReadDir(dir)
		if len(files) > 0 {
			t.Errorf("the new directory has %v", files)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}
