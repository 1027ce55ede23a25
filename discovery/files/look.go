package files

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/nametap/nametap/internal/statedir"
)

// maxFileSize bounds one file. 100,000 hosts are about 50 MB of YAML.
const maxFileSize = 256 << 20

var errTooLarge = fmt.Errorf("is larger than %d MiB", maxFileSize>>20)

// rootName is the name of the directory itself.
const rootName = "."

// A look is what was found in the directory at a time. Names are paths below the directory.
type look struct {
	files  map[string]stamp
	failed map[string]error // why files and directories could not be read, by name
}

// A stamp of a file changes when its content may have changed. For a symbolic link it is the stamp of the target.
type stamp struct {
	fileID
	size         int64
	mtime, ctime syscall.Timespec
}

// A fileID distinguishes two files that have the same name one after the other.
type fileID struct{ dev, ino uint64 }

// stampOf returns the stamp in info.
func stampOf(info fs.FileInfo) stamp {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{size: info.Size()}
	}
	return stamp{fileID{st.Dev, st.Ino}, st.Size, st.Mtim, st.Ctim}
}

// newLook looks at a directory. It follows symbolic links, because a mounted ConfigMap consists of them, and skips names
// that begin with a dot, which belong to editors and to Kubernetes (..data).
func newLook(root string) *look {
	l := &look{files: map[string]stamp{}, failed: map[string]error{}}
	l.add(root, rootName, map[fileID]bool{})
	return l
}

// add adds a file, or the files below a directory that was not visited under another name: links can make the number of
// names exponential.
func (l *look) add(root, name string, visited map[fileID]bool) {
	place := filepath.Join(root, filepath.FromSlash(name))
	info, err := os.Stat(place)
	switch {
	case err != nil:
		l.fail(name, err)
	case info.IsDir():
		id := stampOf(info).fileID
		if visited[id] {
			return
		}
		visited[id] = true
		entries, err := os.ReadDir(place)
		if err != nil {
			l.fail(name, err)
			return
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				l.add(root, path.Join(name, e.Name()), visited)
			}
		}
	case info.Mode().IsRegular():
		switch strings.ToLower(path.Ext(name)) {
		case ".yaml", ".yml", ".json":
			if l.files[name] = stampOf(info); info.Size() > maxFileSize {
				l.fail(name, errTooLarge)
			}
		}
	}
}

// equal reports whether nothing has changed between two looks. other may be nil.
func (l *look) equal(other *look) bool {
	return other != nil && maps.Equal(l.files, other.files) &&
		maps.EqualFunc(l.failed, other.failed, func(a, b error) bool { return a.Error() == b.Error() })
}

// fail notes that a file or a directory could not be read.
func (l *look) fail(name string, err error) {
	l.failed[name] = fmt.Errorf("cannot be read: %w", withoutPath(err))
}

// withoutPath returns err without the path, which the caller adds.
func withoutPath(err error) error {
	var of *fs.PathError
	if errors.As(err, &of) {
		return of.Err
	}
	return err
}

// hiding returns the name of what could not be read and hides a file: the file, or a directory above it. It returns "" if
// there is none, so that a file that was not found is gone.
func (l *look) hiding(file string) string {
	for name := file; ; name = path.Dir(name) {
		if l.failed[name] != nil {
			return name
		}
		if name == rootName {
			return ""
		}
	}
}

// isPart reports whether a part could not be read, and may be read soon: not because of its permissions, for example.
func (l *look) isPart() bool {
	if l.failed[rootName] != nil {
		return true
	}
	for _, err := range l.failed {
		if statedir.Passing(err) {
			return true
		}
	}
	return false
}

// read returns the content of a file that has not changed since the look.
func (l *look) read(root, name string) ([]byte, error) {
	place := filepath.Join(root, filepath.FromSlash(name))
	data, err := os.ReadFile(place)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(place)
	if err == nil && stampOf(info) != l.files[name] {
		err = errBusy
	}
	return data, err
}
