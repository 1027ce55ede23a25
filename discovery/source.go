package discovery

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	// maxFileSize bounds one file. 100,000 hosts are about 50 MB of YAML.
	maxFileSize = 256 << 20
	// settleTime is how long a file that was just emptied counts as what it
	// was: a shell that writes "generate > shop.yaml" empties the file first.
	settleTime = time.Second
)

// source reads a directory of objects again and again and remembers what was
// good. It belongs to one goroutine.
type source struct {
	dir string

	// files holds the last content of each file and what it parsed to, so
	// that an edit costs one file. The key is the path below dir.
	files map[string]sourceFile
	// hadErrs is set if the last reading came upon what it could not read.
	hadErrs bool
	// good holds the last good form of each object that counts.
	good map[key]object
}

type sourceFile struct {
	data   []byte
	parsed parsed
}

// reading is the state of the directory after one read.
type reading struct {
	objects []object // sorted by key
	errs    []DocumentError
	notes   []string // why objects make no host, each with its file, sorted
	dirs    []string // directories that a watcher must watch
	// unsettled is set if a file was left as it was for now: read again soon.
	unsettled bool
	// same is set if every file is as in the reading before.
	same bool
}

func newSource(dir string) *source {
	return &source{dir: dir, files: map[string]sourceFile{}, good: map[key]object{}}
}

// read reads the directory. The error is set only if the directory itself
// cannot be read; everything below it is part of the reading.
func (s *source) read() (reading, error) {
	w := walk{root: s.dir, files: map[string][]byte{}, emptied: map[string]bool{}}
	if err := w.dir("", nil); err != nil {
		return reading{}, fmt.Errorf("reading the configuration directory: %w", err)
	}
	files := make(map[string]sourceFile, len(w.files))
	unsettled, same := false, len(w.files) == len(s.files) && len(w.errs) == 0 && !s.hadErrs
	for name, data := range w.files {
		old, ok := s.files[name]
		if ok && w.emptied[name] && len(old.data) > 0 {
			unsettled, files[name] = true, old
			continue
		}
		if !ok || !bytes.Equal(old.data, data) {
			old, same = sourceFile{data: data, parsed: parseFile(name, data)}, false
		}
		files[name] = old
	}
	s.files, s.hadErrs = files, len(w.errs) > 0
	r := s.merge(&w)
	r.dirs, r.unsettled, r.same = w.dirs, unsettled, same
	return r, nil
}

// merge puts the files together. Where a file holds less than before because
// something in it is broken, the last good form stays: nothing that worked is
// lost by a slip.
func (s *source) merge(w *walk) reading {
	r := reading{errs: w.errs}
	now := make(map[key]object, len(s.good))
	for _, name := range sortedKeys(s.files) {
		p := s.files[name].parsed
		r.errs = append(r.errs, p.errs...)
		for _, note := range p.notes {
			r.notes = append(r.notes, name+": "+note)
		}
		for _, o := range p.objects {
			if first, ok := now[o.key]; ok {
				r.errs = append(r.errs, DocumentError{File: o.file, Line: o.line, Field: "metadata.name",
					Msg: fmt.Sprintf("%s is already in %s:%d, this one does not count", o.key, first.file, first.line)})
				continue
			}
			now[o.key] = o
		}
	}
	for k, o := range s.good {
		if _, ok := now[k]; !ok && s.keeps(w, o) {
			now[k] = o
			r.markKept(o)
		}
	}
	s.good = now
	for _, k := range slices.SortedFunc(mapKeys(now), compareKeys) {
		r.objects = append(r.objects, now[k])
	}
	slices.SortStableFunc(r.errs, func(a, b DocumentError) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Field, b.Field))
	})
	slices.Sort(r.notes)
	r.notes = slices.Compact(r.notes)
	return r
}

// keeps reports whether an object that was good and is not there any more may
// be there still, in a form that cannot be read.
func (s *source) keeps(w *walk, o object) bool {
	for name, f := range s.files {
		if f.parsed.broken[o.key] || (name == o.file && f.parsed.unnamed) {
			return true
		}
	}
	for _, path := range w.unreadable {
		if path == "" || o.file == path || strings.HasPrefix(o.file, path+"/") {
			return true
		}
	}
	return false
}

// markKept tells in the errors that stand for o that it counts still.
func (r *reading) markKept(o object) {
	for i := range r.errs {
		e := &r.errs[i]
		if e.object == o.key || (e.object.name == "" && e.File == o.file) {
			e.Kept = true
		}
	}
}

func compareKeys(a, b key) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
}

// walk collects the files below a directory. Symbolic links are followed, as
// a mounted ConfigMap consists of them; names that begin with a dot are
// editors' and Kubernetes' own (..data) and are passed over.
type walk struct {
	root       string
	files      map[string][]byte
	emptied    map[string]bool // files without a byte, written just now
	dirs       []string
	errs       []DocumentError
	unreadable []string
}

// dir reads the directory rel; parents are its ancestors with links resolved,
// so that a link to one of them is not followed for ever.
func (w *walk) dir(rel string, parents []string) error {
	path := filepath.Join(w.root, filepath.FromSlash(rel))
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	if slices.Contains(parents, resolved) {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	// Resolved, so that a link that turns elsewhere is a new directory to watch.
	w.dirs = append(w.dirs, resolved)
	parents = append(slices.Clip(parents), resolved)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		name := joinSlash(rel, e.Name())
		if err := w.entry(name, parents); err != nil && !errors.Is(err, fs.ErrNotExist) {
			w.unreadable = append(w.unreadable, name)
			w.errs = append(w.errs, DocumentError{File: name, Msg: "cannot be read: " + plainError(err)})
		}
	}
	return nil
}

func (w *walk) entry(name string, parents []string) error {
	path := filepath.Join(w.root, filepath.FromSlash(name))
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	switch {
	case info.IsDir():
		return w.dir(name, parents)
	case !info.Mode().IsRegular():
		return nil
	}
	switch strings.ToLower(filepath.Ext(name)) {
	case ".yaml", ".yml", ".json":
	default:
		return nil
	}
	if info.Size() > maxFileSize {
		return fmt.Errorf("is larger than %d MiB", maxFileSize>>20)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	w.files[name] = data
	if len(data) == 0 && time.Since(info.ModTime()) < settleTime {
		w.emptied[name] = true
	}
	return nil
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
