package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/nametap/nametap/discovery/object"
)

// maxFileSize bounds one file. 100,000 hosts are about 50 MB of YAML.
const maxFileSize = 256 << 20

// walk reads the files below a directory. It follows symbolic links, because a mounted
// ConfigMap consists of them, and skips names that begin with a dot, which belong to
// editors and to Kubernetes (..data).
type walk struct {
	root  string
	files map[string]foundFile // by path below root
	// dirs holds every directory by its path below root, "" for root itself.
	dirs map[string]foundDir
	// visited holds the directories that were read, with links resolved.
	visited map[string]bool
	// watch holds the directories to watch for changes.
	watch watchList
	errs  []object.Error
	// unreadable holds the paths that could not be read.
	unreadable []string
	// transient says that the reason may pass for one of them.
	transient bool
}

// foundFile is a file that a walk found.
type foundFile struct {
	data []byte
	info fs.FileInfo
}

// foundDir is a directory that a walk found.
type foundDir struct {
	id    fileID
	empty bool // no entry has a name that is read
}

// fileID distinguishes a directory from another one of the same name, such as the
// directory below a mount point.
type fileID struct{ dev, ino uint64 }

// idOf returns the fileID of info, or the zero value if info has none.
func idOf(info fs.FileInfo) fileID {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return fileID{dev: st.Dev, ino: st.Ino}
	}
	return fileID{}
}

func newWalk(root string) *walk {
	return &walk{root: root, files: map[string]foundFile{}, dirs: map[string]foundDir{}, visited: map[string]bool{}, watch: watchList{}}
}

// dir reads the directory rel, unless it was read under another path: links can make the
// number of paths exponential.
func (w *walk) dir(rel string) error {
	path := filepath.Join(w.root, filepath.FromSlash(rel))
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	if w.visited[resolved] {
		return nil
	}
	w.visited[resolved] = true
	info, err := os.Stat(resolved)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	w.watch.add(resolved, info)
	empty := true
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		empty = false
		name := joinSlash(rel, e.Name())
		if err := w.entry(name); err != nil && !w.wasRemoved(name, err) {
			w.cannotRead(name, err)
		}
	}
	w.dirs[rel] = foundDir{id: idOf(info), empty: empty}
	return nil
}

// wasRemoved reports whether an entry was removed after its directory was read. A link
// whose target is missing was not removed.
func (w *walk) wasRemoved(name string, err error) bool {
	if !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	_, err = os.Lstat(filepath.Join(w.root, filepath.FromSlash(name)))
	return errors.Is(err, fs.ErrNotExist)
}

func (w *walk) cannotRead(name string, err error) {
	w.unreadable = append(w.unreadable, name)
	w.transient = w.transient || !isPermanent(err)
	w.errs = append(w.errs, object.Error{File: name, Msg: "cannot be read: " + plainError(err)})
}

// hides reports whether a file could not be seen because it, or a directory above it,
// could not be read.
func (w *walk) hides(file string) bool {
	for _, path := range w.unreadable {
		if file == path || strings.HasPrefix(file, path+"/") {
			return true
		}
	}
	return false
}

// errTooLarge marks a file that is larger than maxFileSize.
var errTooLarge = fmt.Errorf("is larger than %d MiB", maxFileSize>>20)

// isPermanent recognises the errors that last until the file or its permissions are
// changed. Every other error, such as one of the network or the disk, may be gone at the
// next read.
func isPermanent(err error) bool {
	for _, permanent := range []error{
		fs.ErrPermission, fs.ErrNotExist, errTooLarge, syscall.ELOOP, syscall.ENOTDIR, syscall.ENAMETOOLONG,
	} {
		if errors.Is(err, permanent) {
			return true
		}
	}
	// EvalSymlinks has an error of its own for ELOOP.
	return strings.Contains(err.Error(), "too many links")
}

func (w *walk) entry(name string) error {
	path := filepath.Join(w.root, filepath.FromSlash(name))
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	switch {
	case info.IsDir():
		return w.dir(name)
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
	w.watch.addTarget(path)
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	w.files[name] = foundFile{data: data, info: info}
	return nil
}

func joinSlash(rel, name string) string {
	if rel == "" {
		return name
	}
	return rel + "/" + name
}

// plainError returns err without the path, which the caller names already.
func plainError(err error) string {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err.Error()
	}
	return err.Error()
}
