package files

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

const (
	// maxFileSize bounds one file. 100,000 hosts are about 50 MB of YAML.
	maxFileSize = 256 << 20
	// youngAge is the age up to which an equal stamp does not prove that the file is unchanged, so its content is read
	// again. Two writes may have the same time, because some file systems count time in steps of 2 s.
	youngAge = 2 * time.Second
)

// A tree is the result of one read of the directory.
type tree struct {
	files map[string]*file // by path below the root
	empty map[string]bool  // by path of a directory, "" for the root: whether all names in it begin with a dot
	errs  []object.Error   // the files and directories that could not be read
	// transient is true if one of errs may be gone at the next read.
	transient bool
}

// A file is a file as it was when the tree was read. Only the field parsed changes.
type file struct {
	stamp     stamp
	stampSeen time.Time // when the stamp was first seen
	data      []byte
	parsed    *parsed // nil until the file is used
}

// A stamp of a file changes when the content may have changed. For a symbolic link it is the stamp of the target.
type stamp struct {
	fileID
	size         int64
	mtime, ctime syscall.Timespec
}

// A fileID distinguishes two files that have the same name one after the other.
type fileID struct{ dev, ino uint64 }

// file returns the file with the given name; nil if there is none, or if t is nil.
func (t *tree) file(name string) *file {
	if t == nil {
		return nil
	}
	return t.files[name]
}

// sameInode reports whether f and other are states of the same inode: then the file was written in place. Both may be
// nil.
func (f *file) sameInode(other *file) bool {
	return f != nil && other != nil && f.stamp.fileID == other.stamp.fileID
}

// stampOf returns the stamp in info.
func stampOf(info fs.FileInfo) stamp {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{size: info.Size(), mtime: syscall.NsecToTimespec(info.ModTime().UnixNano())}
	}
	return stamp{fileID: fileID{dev: st.Dev, ino: st.Ino}, size: st.Size, mtime: st.Mtim, ctime: st.Ctim}
}

// equal reports whether two trees have the same files, directories and errors. A nil tree equals no tree.
func (t *tree) equal(other *tree) bool {
	return t != nil && other != nil && slices.Equal(t.errs, other.errs) && maps.Equal(t.empty, other.empty) &&
		maps.EqualFunc(t.files, other.files, func(a, b *file) bool {
			return a == b || a.stamp == b.stamp && bytes.Equal(a.data, b.data)
		})
}

// A reader reads a directory. It follows symbolic links, because a mounted ConfigMap consists of them,
// and skips names that begin with a dot, which belong to editors and to Kubernetes (..data).
type reader struct {
	*tree
	root     string
	previous *tree           // the tree whose unchanged files are used again; may be nil
	visited  map[fileID]bool // directories
}

// readTree reads the directory root. It returns an error only if root itself cannot be read; other errors
// are part of the tree.
func readTree(root string, previous *tree) (*tree, error) {
	r := reader{&tree{files: map[string]*file{}, empty: map[string]bool{}}, root, previous, map[fileID]bool{}}
	info, err := os.Stat(root)
	if err == nil {
		err = r.dir("", info)
	}
	return r.tree, err
}

// dir reads the directory rel, unless it was read under another path: links can make the number of paths
// exponential.
func (r *reader) dir(rel string, info fs.FileInfo) error {
	id := stampOf(info).fileID
	if r.visited[id] {
		return nil
	}
	r.visited[id] = true
	entries, err := os.ReadDir(filepath.Join(r.root, filepath.FromSlash(rel)))
	if err != nil {
		return err
	}
	empty := true
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		empty = false
		name := e.Name()
		if rel != "" {
			name = rel + "/" + name
		}
		if err := r.entry(name); err != nil { // if the entry was just removed, the next read does not find it
			r.transient = r.transient || !isPermanent(err)
			r.errs = append(r.errs, object.Error{File: name, Msg: "cannot be read: " + plainError(err)})
		}
	}
	r.empty[rel] = empty
	return nil
}

// entry reads a file or a directory.
func (r *reader) entry(name string) error {
	path := filepath.Join(r.root, filepath.FromSlash(name))
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return r.dir(name, info)
	case !info.Mode().IsRegular():
		return nil
	}
	switch strings.ToLower(filepath.Ext(name)) {
	case ".yaml", ".yml", ".json":
	default:
		return nil
	}
	if info.Size() > maxFileSize {
		return errTooLarge
	}
	f := &file{stamp: stampOf(info), stampSeen: time.Now()}
	old := r.previous.file(name)
	if old != nil && old.stamp == f.stamp {
		if time.Since(old.stampSeen) > youngAge {
			r.files[name] = old
			return nil
		}
		f.stampSeen = old.stampSeen
	}
	if f.data, err = os.ReadFile(path); err != nil {
		return err
	}
	if old != nil && bytes.Equal(old.data, f.data) {
		f.data, f.parsed = old.data, old.parsed
	}
	r.files[name] = f
	return nil
}

// errTooLarge marks a file that is larger than maxFileSize.
var errTooLarge = fmt.Errorf("is larger than %d MiB", maxFileSize>>20)

// isPermanent reports whether err lasts until the file or its permissions are changed. Every other
// error, such as an error of the network or the disk, may be gone at the next read.
func isPermanent(err error) bool {
	for _, permanent := range []error{
		fs.ErrPermission, fs.ErrNotExist, errTooLarge, syscall.ELOOP, syscall.ENOTDIR, syscall.ENAMETOOLONG,
	} {
		if errors.Is(err, permanent) {
			return true
		}
	}
	return false
}

// plainError returns the text of err without the path, which the caller adds.
func plainError(err error) string {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err.Error()
	}
	return err.Error()
}
