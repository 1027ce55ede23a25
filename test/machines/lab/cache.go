package lab

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cached returns a directory below $XDG_CACHE_HOME/nametap, by default ~/.cache/nametap, that build has filled from recipe.
// The recipe is everything that the content depends on, such as a list of packages. If the directory is missing, Cached
// calls build with a new one, and keeps that if build succeeds. If several processes ask for the same directory, one of
// them builds. The cache may be removed while no test runs.
func Cached(name string, recipe []string, build func(dir string) error) (string, error) {
	top, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache: %w", err)
	}
	top = filepath.Join(top, "nametap")
	if err := os.MkdirAll(top, 0o755); err != nil {
		return "", fmt.Errorf("making the cache: %w", err)
	}
	hash := sha256.Sum256([]byte(strings.Join(recipe, "\x00")))
	dir := filepath.Join(top, name+"-"+hex.EncodeToString(hash[:6]))
	unlock, err := lock(dir + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	partial := dir + ".partial" // of an interrupted build, or of this one
	if err := os.RemoveAll(partial); err != nil {
		return "", fmt.Errorf("removing an interrupted build: %w", err)
	}
	if err := os.Mkdir(partial, 0o755); err != nil {
		return "", err
	}
	if err := build(partial); err != nil {
		return "", errors.Join(fmt.Errorf("building %s: %w", dir, err), os.RemoveAll(partial))
	}
	return dir, os.Rename(partial, dir)
}

// lock waits until no other process has locked the file.
func lock(path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return func() { _ = file.Close() }, nil
}
