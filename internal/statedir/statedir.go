// Package statedir keeps the files of a process in a state directory. A lock makes sure
// that two processes do not overwrite each other's files. Files are never written through
// links, because the process may be root while the directory belongs to another user.
package statedir

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	dirMode  = 0o700
	fileMode = 0o600

	// writeBuffer is the size of the buffer that collects short parts for one write.
	writeBuffer = 32 << 10
)

// ErrTaken is the error if another process has locked the state directory.
var ErrTaken = errors.New("another process uses the state directory: give each process one of its own (--state-dir)")

// Check creates a state directory if it does not exist. It returns an error if no file can be written there.
func Check(path string) error {
	if err := os.MkdirAll(path, dirMode); err != nil {
		return err
	}
	probe, err := os.CreateTemp(path, ".probe-")
	if err != nil {
		return err
	}
	_, err = probe.WriteString("nametap")
	return errors.Join(err, probe.Close(), os.Remove(probe.Name()))
}

// Passing reports whether an error of [Check] may go away without a change of the settings, because the disk is
// full or faulty.
func Passing(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EIO) || errors.Is(err, unix.ESTALE)
}

// A Dir is a state directory. Make one with [New]. Its methods are safe for concurrent
// use.
type Dir struct {
	path     string
	lockName string

	mu   sync.Mutex
	lock *os.File // nil while this process does not hold the lock
}

// New returns the state directory at path, unlocked. Processes with the same lockName
// exclude each other.
func New(path, lockName string) *Dir { return &Dir{path: path, lockName: lockName} }

// File returns the path of a file in the directory.
func (d *Dir) File(name string) string { return filepath.Join(d.path, name) }

// Lock creates the directory if it does not exist and locks it until Unlock. It does nothing if this Dir holds the
// lock already, and returns [ErrTaken] if another Dir or process holds it. The kernel releases the lock when the
// process ends. On a file system without locks, Lock excludes no other process.
func (d *Dir) Lock() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lock != nil && d.lockInPlaceLocked() {
		return nil
	}
	d.unlockLocked()
	if err := os.MkdirAll(d.path, dirMode); err != nil {
		return err
	}
	lock, err := os.OpenFile(d.File(d.lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, fileMode)
	if err != nil {
		return err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	switch {
	case err == nil || unsupported(err):
		d.lock = lock
		return nil
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrTaken
	default:
		err = fmt.Errorf("locking %q: %w", lock.Name(), err)
	}
	return errors.Join(err, lock.Close())
}

// unsupported reports whether err means that the file system has no locks, such as Lustre
// without the mount option flock, or NFS without a lock daemon. The files can be used, but
// other processes cannot be excluded.
func unsupported(err error) bool {
	return errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOLCK)
}

// lockInPlaceLocked reports whether the lock file that d holds is still in the directory. It is false after the
// directory, or the file, was removed.
func (d *Dir) lockInPlaceLocked() bool {
	held, err := d.lock.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(d.File(d.lockName))
	return err == nil && os.SameFile(held, current)
}

// Unlock releases the lock. It does nothing if d does not hold it.
func (d *Dir) Unlock() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unlockLocked()
}

func (d *Dir) unlockLocked() {
	if d.lock != nil {
		_ = d.lock.Close() // nothing was written to it
		d.lock = nil
	}
}

// Write locks the directory and replaces the contents of a file in one step: a reader finds either the previous
// contents or the new contents, even after a power failure. The new contents are parts, one after the other.
func (d *Dir) Write(name string, parts ...[]byte) error {
	if err := d.Lock(); err != nil {
		return err
	}
	path := d.File(name)
	temporary := path + ".tmp"
	if err := writeSynced(temporary, parts); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if err := os.Rename(temporary, path); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	dir, err := os.Open(d.path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// SetAside renames a file that cannot be used: the file is kept, but not used again. It returns the new path. ending
// is the last part of the new name, and gives the reason.
func (d *Dir) SetAside(name, ending string) (path string, err error) {
	path = d.File(name) + "." + ending
	return path, os.Rename(d.File(name), path)
}

// writeSynced writes a new file and waits until the file is on the disk. First it removes a file with the same path,
// which an interrupted write may have left.
func writeSynced(path string, parts [][]byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, writeBuffer)
	for _, part := range parts {
		_, _ = w.Write(part) // Flush returns its error, too
	}
	if err = w.Flush(); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
