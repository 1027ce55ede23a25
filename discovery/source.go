package discovery

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

const (
	// settleTime is how long the previous content of a file stays in use while the file
	// seems to be half written: "generate > shop.yaml" empties the file first.
	settleTime = time.Second
	// maxSettleTime bounds how long a removed object stays in use while other files
	// change.
	maxSettleTime = 10 * time.Second
	// rootName is the name of the configuration directory itself in errors.
	rootName = "."
)

// source reads a directory of objects, as often as it is called, and decides which objects
// are in use. It belongs to one goroutine.
type dirSource struct {
	dir string
	// allowEmpty is Config.AllowEmpty.
	allowEmpty bool

	// files holds the content in use of each file, so that after an edit only one file is
	// parsed. The key is the path below dir.
	files map[string]sourceFile
	// dirs holds the identity of each directory when it last was not empty.
	dirs map[string]fileID
	// hadErrs says that the previous read could not read everything.
	hadErrs bool
	// good holds the last good form of each object in use.
	good map[object.Key]located
	// removed holds, for the objects in good that were not found, since when. They stay in
	// use until they have settled. changed is when a file last changed.
	removed map[object.Key]time.Time
	changed time.Time
	first   bool // nothing has been read yet
}

// located is an object with the place where it is.
type located struct {
	object.Object
	file string
	line int
	text *chunk // the document that holds it
}

type sourceFile struct {
	data   []byte
	parsed parsed
	info   fs.FileInfo
	// next is content that may be half written; nil if there is none.
	next *nextContent
}

// nextContent is content that comes into use when the file has not changed for
// settleTime. The modification time cannot tell that: the clock may jump, and a file
// server has another one.
type nextContent struct {
	data   []byte
	parsed parsed
	since  time.Time
}

// reading is the result of reading the directory once.
type reading struct {
	objects []object.Object // in use, sorted by key
	errs    []object.Error
	notes   []string // why objects make no host, each with its file, sorted
	watch   watchList
	// kept counts the objects in use that are broken or cannot be read now.
	kept int
	// unsettled says that a file seems half written, or that a removed object is in use:
	// read again soon.
	unsettled bool
	// same says that all files, and the objects in use, are those of the previous read.
	same bool
	// transient says that something could not be read for a reason that may pass.
	transient bool
}

// newDirSource returns a source that starts with the last good objects of an earlier process,
// which may be nil.
func newDirSource(dir string, allowEmpty bool, good map[object.Key]located) *dirSource {
	if good == nil {
		good = map[object.Key]located{}
	}
	return &dirSource{
		dir: dir, allowEmpty: allowEmpty, good: good, first: true,
		files: map[string]sourceFile{}, dirs: map[string]fileID{}, removed: map[object.Key]time.Time{},
	}
}

// read reads the directory. It returns an error only if the directory itself cannot be
// read; errors below it are part of the reading.
func (s *dirSource) read() (reading, error) {
	w := newWalk(s.dir)
	w.watch.addLinks(s.dir)
	if err := w.dir(""); err != nil {
		return reading{watch: w.watch}, fmt.Errorf("reading the configuration directory (--config-dir): %w", err)
	}
	s.checkDirs(w)
	files := make(map[string]sourceFile, len(w.files))
	unsettled, same := false, len(w.files) == len(s.files)
	for name, found := range w.files {
		old, ok := s.files[name]
		f := s.update(name, old, found)
		files[name] = f
		unsettled = unsettled || f.next != nil
		same = same && ok && bytes.Equal(old.data, f.data)
	}
	if s.files = files; !same || unsettled {
		s.changed = time.Now()
	}
	removed := len(s.removed)
	r := s.merge(w)
	r.watch, r.transient = w.watch, w.transient
	r.unsettled = unsettled || len(s.removed) > 0
	r.same = same && len(w.errs) == 0 && !s.hadErrs && len(s.removed) >= removed
	s.hadErrs = len(w.errs) > 0
	return r, nil
}

// checkDirs treats an empty directory as unreadable if objects came from it and it is not
// the same directory as before: its file system was unmounted. A directory that was
// emptied file by file is the same one, and really empty.
func (s *dirSource) checkDirs(w *walk) {
	dirs := map[string]fileID{}
	for rel, found := range w.dirs {
		previous := s.dirs[rel] // at the start the zero value, which differs from any
		if rel != "" && found.empty && previous != found.id && !s.allowEmpty && s.holdsBelow(rel) {
			dirs[rel] = previous
			w.unreadable = append(w.unreadable, rel)
			w.errs = append(w.errs, object.Error{File: rel,
				Msg: "is empty and not the same directory as before: mount it again, or remove it if that is intended"})
			continue
		}
		dirs[rel] = found.id
	}
	s.dirs = dirs
}

// holdsBelow reports whether an object came from below a directory.
func (s *dirSource) holdsBelow(rel string) bool {
	for _, o := range s.good {
		if strings.HasPrefix(o.file, rel+"/") {
			return true
		}
	}
	return false
}

// update returns the content of a file that is in use now.
func (s *dirSource) update(name string, old sourceFile, found foundFile) sourceFile {
	if old.info != nil && bytes.Equal(old.data, found.data) {
		return sourceFile{data: old.data, parsed: old.parsed, info: found.info}
	}
	next := old.next
	if next == nil || !bytes.Equal(next.data, found.data) {
		next = &nextContent{data: found.data, parsed: s.parse(name, found.data), since: time.Now()}
	}
	if old.info != nil && seemsHalfWritten(old, next, found.info) && time.Since(next.since) < settleTime {
		return sourceFile{data: old.data, parsed: old.parsed, info: old.info, next: next}
	}
	return sourceFile{data: next.data, parsed: next.parsed, info: found.info}
}

// parse is parseFile, except that an empty file that held objects is an error: it is taken
// for a file that is being written, however long that takes.
func (s *dirSource) parse(name string, data []byte) parsed {
	if len(data) > 0 || s.allowEmpty {
		return parseFile(name, data)
	}
	for _, o := range s.good {
		if o.file == name {
			return parsed{unnamed: true, errs: []object.Error{{File: name,
				Msg: "is empty: write it again, or remove it if that is intended"}}}
		}
	}
	return parsed{}
}

// seemsHalfWritten reports whether a file holds less than before. A file that was renamed
// into place is complete, so it does not seem half written.
func seemsHalfWritten(old sourceFile, next *nextContent, info fs.FileInfo) bool {
	if !os.SameFile(old.info, info) {
		return false
	}
	if bytes.HasPrefix(old.data, next.data) {
		return true
	}
	found := make(map[object.Key]bool, len(next.parsed.objects))
	for _, o := range next.parsed.objects {
		found[o.Key] = true
	}
	return slices.ContainsFunc(old.parsed.objects, func(o located) bool { return !found[o.Key] })
}

// merge combines the objects of all files. An object that is missing because something is
// broken stays in use in its last good form.
func (s *dirSource) merge(w *walk) reading {
	r := reading{errs: w.errs}
	inUse := make(map[object.Key]located, len(s.good))
	for _, name := range slices.Sorted(maps.Keys(s.files)) {
		p := s.files[name].parsed
		r.errs = append(r.errs, p.errs...)
		for _, note := range p.notes {
			r.notes = append(r.notes, name+": "+note)
		}
		for _, o := range p.objects {
			if first, ok := inUse[o.Key]; ok {
				r.errs = append(r.errs, object.Error{File: o.file, Line: o.line, Field: "metadata.name",
					Msg: fmt.Sprintf("%s is already in %s:%d; this one is ignored", o.Key, first.file, first.line)})
				continue
			}
			inUse[o.Key] = o
		}
	}
	s.keep(w, &r, inUse)
	s.good = inUse
	r.objects = s.objects()
	slices.SortStableFunc(r.errs, func(a, b object.Error) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Field, b.Field))
	})
	slices.Sort(r.notes)
	r.notes = slices.Compact(r.notes)
	return r
}

// objects returns the last good form of every object, sorted by key.
func (s *dirSource) objects() []object.Object {
	out := make([]object.Object, 0, len(s.good))
	for _, k := range slices.SortedFunc(maps.Keys(s.good), object.Key.Compare) {
		out = append(out, s.good[k].Object)
	}
	return out
}

// keep adds to inUse the good objects that are broken, that cannot be read now, or that
// were removed and have not settled. If no object at all is left, it keeps all of them
// unless AllowEmpty is set: an empty directory is usually one that is being mounted or
// copied.
func (s *dirSource) keep(w *walk, r *reading, inUse map[object.Key]located) {
	broken, unnamed := map[object.Key]bool{}, map[string]bool{}
	for name, f := range s.files {
		for k := range f.parsed.broken {
			broken[k] = true
		}
		unnamed[name] = f.parsed.unnamed
	}
	removed := map[object.Key]time.Time{}
	for k, o := range s.good {
		found, ok := inUse[k]
		switch {
		// An object of this name in another file is used only when the file that holds
		// the object in use is repaired or removed.
		case ok && (found.file == o.file || !s.files[o.file].parsed.broken[k]):
		case broken[k], unnamed[o.file], w.hides(o.file):
			inUse[k] = o
			r.kept++
			r.markKept(o)
		case !ok && s.mayReturn(o):
			removed[k] = s.removed[k]
		}
	}
	if s.removed, s.first = removed, false; len(inUse) > 0 || len(s.good) == 0 || s.allowEmpty {
		for k := range removed {
			inUse[k] = s.good[k]
		}
		return
	}
	s.removed = map[object.Key]time.Time{}
	maps.Copy(inUse, s.good)
	r.kept = len(inUse)
	r.errs = append(r.errs, object.Error{File: rootName, Kept: true,
		Msg: "holds no object any more: bring the files back, or start with --allow-empty if that is intended"})
}

// mayReturn reports whether an object that was not found stays in use for now. Its file may
// be on the way to another directory, or about to be written again, as git and scripts do.
// In the first read of a process, its file may be half written.
func (s *dirSource) mayReturn(o located) bool {
	since, ok := s.removed[o.Key]
	if _, present := s.files[o.file]; !ok && present && !s.first {
		return false
	}
	if !ok {
		since = time.Now()
		s.removed[o.Key] = since
	}
	missing := time.Since(since)
	return missing < settleTime || time.Since(s.changed) < settleTime && missing < maxSettleTime
}

// markKept marks the errors about o: its last good form is in use.
func (r *reading) markKept(o located) {
	for i := range r.errs {
		e := &r.errs[i]
		same := e.Object == o.Key || (e.Object.Name == "" && e.File == o.file)
		if same || strings.HasPrefix(o.file, e.File+"/") {
			e.Kept = true
		}
	}
}
