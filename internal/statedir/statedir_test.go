package statedir_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/statedir"
)

const lockName = "test.lock"

// entries returns the names of the files in a directory.
func entries(t *testing.T, dir string) []string {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names
}

// C7: only one process at a time writes to a state directory.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "state")
	first, second := statedir.New(path, lockName), statedir.New(path, lockName)
	for range 2 { // locking twice is locking once
		if err := first.Lock(); err != nil {
			t.Fatal(err)
		}
	}
	if err := second.Lock(); !errors.Is(err, statedir.ErrTaken) {
		t.Errorf("second lock: %v, want ErrTaken", err)
	}
	if err := second.Write("file", []byte("second")); !errors.Is(err, statedir.ErrTaken) {
		t.Errorf("second write: %v, want ErrTaken", err)
	}
	if err := statedir.New(path, "other.lock").Lock(); err != nil {
		t.Errorf("a lock of another name: %v", err)
	}
	first.Unlock()
	if err := second.Lock(); err != nil {
		t.Errorf("second lock after the first was released: %v", err)
	}
	second.Unlock()
	second.Unlock()
}

// C7: a directory that was removed is created again, with its lock.
func TestLockOfRemovedDirectory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	dir := statedir.New(path, lockName)
	for _, text := range []string{"one", "two"} {
		if err := dir.Write("file", []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(dir.File("file")); string(got) != text {
			t.Fatalf("file holds %q, %v, want %q", got, err, text)
		}
		if err := statedir.New(path, lockName).Lock(); !errors.Is(err, statedir.ErrTaken) {
			t.Errorf("second lock: %v, want ErrTaken", err)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	dir.Unlock()
}

// C7: files are readable by their owner only, and a write leaves no temporary file, not
// even if it fails.
func TestWrite(t *testing.T) {
	path := t.TempDir()
	dir := statedir.New(path, lockName)
	defer dir.Unlock()
	if err := dir.Write("file", []byte("one")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir.File("file")); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", info, err)
	}
	// Even root cannot replace a directory that is not empty.
	if err := os.MkdirAll(dir.File("occupied/by"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := dir.Write("occupied", []byte("one")); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if err := dir.Write("file", []byte("one"), nil, []byte(" two")); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(dir.File("file")); string(text) != "one two" {
		t.Errorf("the file holds %q, %v", text, err)
	}
	if got, want := entries(t, path), []string{"file", "occupied", lockName}; !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

// C7: a link in the directory, which may belong to another user, leads no write elsewhere.
func TestLinks(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("before"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := statedir.New(t.TempDir(), lockName)
	defer dir.Unlock()
	for _, name := range []string{lockName, "file.tmp", "linked"} {
		if err := os.Symlink(outside, dir.File(name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(outside, dir.File("hard.tmp")); err != nil {
		t.Fatal(err)
	}
	if err := dir.Lock(); !errors.Is(err, unix.ELOOP) {
		t.Errorf("the lock is a link: %v, want ELOOP", err)
	}
	if err := os.Remove(dir.File(lockName)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"file", "hard"} {
		if err := dir.Write(name, []byte("written")); err != nil {
			t.Error(err)
		}
		if info, err := os.Lstat(dir.File(name)); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v, want a file with mode 0600", name, info, err)
		}
	}
	if text, err := os.ReadFile(outside); string(text) != "before" {
		t.Errorf("the file outside holds %q, %v", text, err)
	}
}

func TestCheck(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "state")
	if err := statedir.Check(path); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, path); len(got) != 0 {
		t.Errorf("the check left %q", got)
	}
	file := filepath.Join(path, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var pathErr *fs.PathError
	if err := statedir.Check(filepath.Join(file, "below")); !errors.As(err, &pathErr) {
		t.Errorf("a directory below a file: %v, want a path error", err)
	}
}
