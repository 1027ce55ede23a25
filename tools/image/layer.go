package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// files are the files of a layer by their paths, which do not begin with a slash. Directories
// above them need no entry.
type files map[string]file

// A file is a regular file, a directory, or a symbolic link if link is set.
type file struct {
	content []byte
	dir     bool
	link    string
	mode    int64
	owner   int // user and group
}

// readFiles returns the files and links below a directory, as files of root.
func readFiles(dir string) (files, error) {
	all := files{}
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		f := file{mode: int64(info.Mode().Perm())}
		if entry.Type() == fs.ModeSymlink {
			f.link, err = os.Readlink(name)
		} else {
			f.content, err = os.ReadFile(name)
		}
		all[strings.TrimPrefix(name, dir+"/")] = f
		return err
	})
	return all, err
}

// withParents returns the files and the directories above them.
func (f files) withParents() files {
	all := maps.Clone(f)
	for name := range f {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, exists := all[dir]; !exists {
				all[dir] = file{dir: true, mode: 0o755}
			}
		}
	}
	return all
}

// layer returns the files as a layer. All files have the same time.
func (f files) layer(modified time.Time) (v1.Layer, error) {
	all := f.withParents()
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		entry := all[name]
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: entry.mode, Size: int64(len(entry.content)),
			Uid: entry.owner, Gid: entry.owner, ModTime: modified,
		}
		switch {
		case entry.dir:
			header.Typeflag, header.Name = tar.TypeDir, name+"/"
		case entry.link != "":
			header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, entry.link, 0o777
		}
		if err := archive.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(entry.content); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buffer.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}

// write writes the files below a directory. All files have the same time. Only root can write files of other users.
func (f files) write(dir string, modified time.Time) error {
	all := f.withParents()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(all))
	for _, name := range names {
		entry, target := all[name], filepath.Join(dir, name)
		var err error
		switch {
		case entry.dir:
			if err = os.Mkdir(target, 0o755); errors.Is(err, fs.ErrExist) {
				err = nil // another layer has made it
			}
		case entry.link != "":
			err = os.Symlink(entry.link, target)
		default:
			err = os.WriteFile(target, entry.content, 0o600)
		}
		if err == nil && entry.link == "" {
			err = os.Chmod(target, fs.FileMode(entry.mode).Perm()) // whatever the umask
		}
		if err == nil && entry.owner != 0 {
			err = os.Lchown(target, entry.owner, entry.owner)
		}
		if err != nil {
			return err
		}
	}
	slices.Reverse(names) // set the time of a directory after the files in it
	for _, name := range names {
		if all[name].link == "" {
			if err := os.Chtimes(filepath.Join(dir, name), modified, modified); err != nil {
				return err
			}
		}
	}
	return nil
}

// archive writes a directory to a tar file, in the order of its names.
func archive(dir, target string, modified time.Time) (err error) {
	out, err := os.Create(target)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	writer := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: filepath.ToSlash(relative), Mode: 0o644, Size: int64(len(content)), ModTime: modified}
		if err := writer.WriteHeader(header); err != nil {
			return err
		}
		_, err = writer.Write(content)
		return err
	})
	return errors.Join(err, writer.Close())
}
