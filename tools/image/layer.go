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

// layer returns the files as a layer. All have the same time.
func (f files) layer(modified time.Time) (v1.Layer, error) {
	all := maps.Clone(f)
	for name := range f {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, exists := all[dir]; !exists {
				all[dir] = file{dir: true, mode: 0o755}
			}
		}
	}
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
