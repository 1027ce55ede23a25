package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// walk collects the files below a directory. It follows symbolic links, as a
// mounted ConfigMap consists of them, and skips names that begin with a dot:
// those belong to editors and to Kubernetes (..data).
type walk struct {
	root  string
	files map[string]foundFile
	// dirs holds every directory by its path below root, "" for root itself.
	dirs map[string]foundDir
	// seen holds the directories that were read, links resolved.
	seen map[string]bool
	// watch says what a watcher must watch.
	watch watchList
	errs  []DocumentError
	// unreadable holds the paths of what could not be read.
	unreadable []string
	// transient is set if one of them may be readable soon.
	transient bool
}

// foundFile is a file as a walk found it.
type foundFile struct {
	data []byte
	info fs.FileInfo
}

// foundDir is a directory as a walk found it.
type foundDir struct {
	id    fileID
	empty bool // it holds no entry whose name counts
}

// fileID tells a directory from another one of the same name, such as the
// directory below a mount point.
type fileID struct{ dev, ino uint64 }

// idOf is the zero fileID if info has none.
func idOf(info fs.FileInfo) fileID {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return fileID{dev: st.Dev, ino: st.Ino}
	}
	return fileID{}
}

// watchList holds the directories to watch, links resolved. For a directory
// that only holds a link to something of the configuration, it names the link.
type watchList map[string]watchEntry

// watchEntry says which events of a directory count.
type watchEntry struct {
	id    fileID
	all   bool            // every event counts
	names map[string]bool // else those of these names
}

func newWalk(root string) *walk {
	return &walk{root: root, files: map[string]foundFile{}, dirs: map[string]foundDir{}, seen: map[string]bool{}, watch: watchList{}}
}

// dir reads the directory rel, unless it was read by another way: links may make more
// ways than there is time for.
func (w *walk) dir(rel string) error {
	path := filepath.Join(w.root, filepath.FromSlash(rel))
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	if w.seen[resolved] {
		return nil
	}
	w.seen[resolved] = true
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
		if err := w.entry(name); err != nil && !w.isGone(name, err) {
			w.cannotRead(name, err)
		}
	}
	w.dirs[rel] = foundDir{id: idOf(info), empty: empty}
	return nil
}

// isGone reports whether an entry was removed after its directory was read. A
// link whose target is missing is not gone.
func (w *walk) isGone(name string, err error) bool {
	if !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	_, err = os.Lstat(filepath.Join(w.root, filepath.FromSlash(name)))
	return errors.Is(err, fs.ErrNotExist)
}

func (w *walk) cannotRead(name string, err error) {
	w.unreadable = append(w.unreadable, name)
	w.transient = w.transient || !isPermanent(err)
	w.errs = append(w.errs, DocumentError{File: name, Msg: "cannot be read: " + plainError(err)})
}

// errTooLarge marks a file that is longer than maxFileSize.
var errTooLarge = fmt.Errorf("is larger than %d MiB", maxFileSize>>20)

// isPermanent recognises the errors that last until somebody changes the file
// or its permissions. Every other error, such as one of the network or of the
// disk, may be over at the next reading.
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

// add watches all of a directory.
func (l watchList) add(resolved string, info fs.FileInfo) {
	l[resolved] = watchEntry{id: idOf(info), all: true}
}

// addName watches one name in a directory.
func (l watchList) addName(dir, name string) {
	info, err := os.Stat(dir)
	if err != nil {
		return // the reading itself says what cannot be read
	}
	e := l[dir]
	e.id = idOf(info)
	if e.names == nil {
		e.names = map[string]bool{}
	}
	e.names[name] = true
	l[dir] = e
}

// addTarget watches the target of a file that is a link: it may be written
// where it lies.
func (l watchList) addTarget(path string) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeSymlink == 0 {
		return
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		l.addName(filepath.Dir(resolved), filepath.Base(resolved))
	}
}

// addLinks watches every link that the way to path leads over, so that one
// that is turned elsewhere is noticed.
func (l watchList) addLinks(path string) {
	const maxLinks = 40 // as the kernel
	path, err := filepath.Abs(path)
	for range maxLinks {
		if err != nil {
			return
		}
		var link string
		if link = firstLink(path); link == "" {
			return
		}
		l.addName(filepath.Dir(link), filepath.Base(link))
		var target string
		if target, err = os.Readlink(link); err == nil {
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(link), target)
			}
			path = filepath.Join(target, strings.TrimPrefix(path, link))
		}
	}
}

// firstLink is the shortest beginning of path that is a link, or "".
func firstLink(path string) string {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != filepath.Separator {
			continue
		}
		if info, err := os.Lstat(path[:i]); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return path[:i]
		}
	}
	return ""
}

func joinSlash(rel, name string) string {
	if rel == "" {
		return name
	}
	return rel + "/" + name
}

// plainError leaves out the path, which the error around it names already.
func plainError(err error) string {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err.Error()
	}
	return err.Error()
}
