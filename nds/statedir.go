package nds

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// lockName is the file in a state directory that its owner holds locked.
const lockName = "nametap.lock"

// errStateDirTaken says that another process owns a state directory.
var errStateDirTaken = errors.New("another process uses the state directory; each agent needs one of its own (--state-dir)")

// CheckStateDir makes a state directory, if it does not exist, and returns an error if
// files cannot be written in it.
func CheckStateDir(dir string) error {
	const ownerOnly = 0o700
	if err := os.MkdirAll(dir, ownerOnly); err != nil {
		return err
	}
	probe, err := os.CreateTemp(dir, ".probe-")
	if err != nil {
		return err
	}
	_, err = probe.WriteString("nametap")
	return errors.Join(err, probe.Close(), os.Remove(probe.Name()))
}

// A stateDir is the state directory of one client. Its methods may be called
// concurrently; the zero value is no directory.
type stateDir struct {
	path string

	mu   sync.Mutex
	lock *os.File // nil while it is not owned
}

// own makes this process the owner of the directory until release, or returns an error.
// Only the owner writes: another agent's files are not to be overwritten.
func (d *stateDir) own() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lock != nil && d.inPlace() {
		return nil
	}
	d.releaseLocked()
	const ownerOnly, fileMode = 0o700, 0o600
	if err := os.MkdirAll(d.path, ownerOnly); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(d.path, lockName), os.O_RDWR|os.O_CREATE, fileMode)
	if err != nil {
		return err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		err = errStateDirTaken
	case err != nil:
		err = fmt.Errorf("locking %q: %w", lock.Name(), err)
	default:
		d.lock = lock
		return nil
	}
	return errors.Join(err, lock.Close())
}

// inPlace reports whether the lock is that of the directory still. It is not once
// somebody has removed the directory or what is in it.
func (d *stateDir) inPlace() bool {
	held, err := d.lock.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(filepath.Join(d.path, lockName))
	return err == nil && os.SameFile(held, there)
}

// write replaces a file of the directory.
func (d *stateDir) write(name string, data []byte) error {
	if err := d.own(); err != nil {
		return err
	}
	return replaceFile(filepath.Join(d.path, name), data)
}

// release ends the ownership.
func (d *stateDir) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.releaseLocked()
}

func (d *stateDir) releaseLocked() {
	if d.lock != nil {
		_ = d.lock.Close() // nothing was written to it
		d.lock = nil
	}
}
