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
)

const (
	// maxFileSize bounds one file. 100,000 hosts are about 50 MB of YAML.
	maxFileSize = 256 << 20
	// settleTime is how long a file that seems to be written just now counts
	// as what it was: "generate > shop.yaml" empties the file first.
	settleTime = time.Second
	// maxSettleTime bounds how long an object that is gone counts while other files
	// change.
	maxSettleTime = 10 * time.Second
	// rootName is how errors name the configuration directory itself.
	rootName = "."
)

// source reads a directory of objects again and again and remembers what was
// good. It belongs to one goroutine.
type source struct {
	dir string
	// allowEmpty is set if a directory without an object is right.
	allowEmpty bool

	// files holds the last content of each file and what it parsed to, so
	// that an edit costs one file. The key is the path below dir.
	files map[string]sourceFile
	// dirs holds each directory as it was when it last held something.
	dirs map[string]fileID
	// hadErrs is set if the last reading came upon what it could not read.
	hadErrs bool
	// good holds the last good form of each object that counts.
	good map[key]object
	// gone holds those of good that are nowhere to be found, with the time since when,
	// until they no longer count. changed is when a file was last seen to change.
	gone    map[key]time.Time
	changed time.Time
	first   bool // nothing has been read yet
}

type sourceFile struct {
	data   []byte
	parsed parsed
	info   fs.FileInfo
	// next is a content that may be half written; nil if there is none.
	next *nextContent
}

// nextContent is the content that a file will count as once it has not
// changed for settleTime. A wall clock would not do: it may jump, and the
// file may lie on a server with another one.
type nextContent struct {
	data   []byte
	parsed parsed
	since  time.Time
}

// reading is the state of the directory after one read.
type reading struct {
	objects []object // sorted by key
	errs    []DocumentError
	notes   []string // why objects make no host, each with its file, sorted
	watch   watchList
	// kept counts the objects that are there in their last good form only.
	kept int
	// unsettled is set if a file was left as it was for now, or an object that is gone
	// counts: read again soon.
	unsettled bool
	// same is set if every file is as in the reading before, and so is what counts.
	same bool
	// transient is set if something could not be read that may be readable soon.
	transient bool
}

// newSource makes a source that starts with the last good objects of an
// earlier process; they may be nil.
func newSource(dir string, allowEmpty bool, good map[key]object) *source {
	if good == nil {
		good = map[key]object{}
	}
	return &source{
		dir: dir, allowEmpty: allowEmpty, good: good, first: true,
		files: map[string]sourceFile{}, dirs: map[string]fileID{}, gone: map[key]time.Time{},
	}
}

// read reads the directory. The error is set only if the directory itself
// cannot be read; everything below it is part of the reading.
func (s *source) read() (reading, error) {
	w := newWalk(s.dir)
	w.watch.addLinks(s.dir)
	if err := w.dir(""); err != nil {
		return reading{watch: w.watch}, fmt.Errorf("reading the configuration directory: %w", err)
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
	gone := len(s.gone)
	r := s.merge(w)
	r.watch, r.transient = w.watch, w.transient
	r.unsettled = unsettled || len(s.gone) > 0
	r.same = same && len(w.errs) == 0 && !s.hadErrs && len(s.gone) >= gone
	s.hadErrs = len(w.errs) > 0
	return r, nil
}

// checkDirs counts a directory that is empty as unreadable if it held objects
// and is not the directory that it was: its file system was taken away. A
// directory that was emptied file by file is the same one, and empty.
func (s *source) checkDirs(w *walk) {
	dirs := map[string]fileID{}
	for rel, found := range w.dirs {
		before := s.dirs[rel] // zero after a start: another one than any
		if rel != "" && found.empty && before != found.id && !s.allowEmpty && s.holdsBelow(rel) {
			dirs[rel] = before
			w.unreadable = append(w.unreadable, rel)
			w.errs = append(w.errs, DocumentError{File: rel,
				Msg: "is another directory than before, and empty: mount it again, or remove it if that is meant"})
			continue
		}
		dirs[rel] = found.id
	}
	s.dirs = dirs
}

// holdsBelow reports whether an object came from below a directory.
func (s *source) holdsBelow(rel string) bool {
	for _, o := range s.good {
		if strings.HasPrefix(o.file, rel+"/") {
			return true
		}
	}
	return false
}

// update says what a file counts as now.
func (s *source) update(name string, old sourceFile, found foundFile) sourceFile {
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

// parse is parseFile, but a file without a byte that held objects is taken for
// a file that is being written, however long that takes.
func (s *source) parse(name string, data []byte) parsed {
	if len(data) > 0 || s.allowEmpty {
		return parseFile(name, data)
	}
	for _, o := range s.good {
		if o.file == name {
			return parsed{unnamed: true, errs: []DocumentError{{File: name,
				Msg: "is empty: write it anew, or remove it if that is meant"}}}
		}
	}
	return parsed{}
}

// seemsHalfWritten reports whether the same file, not another one that was
// moved to its place, holds less than before.
func seemsHalfWritten(old sourceFile, next *nextContent, info fs.FileInfo) bool {
	if !os.SameFile(old.info, info) {
		return false
	}
	if bytes.HasPrefix(old.data, next.data) {
		return true
	}
	found := make(map[key]bool, len(next.parsed.objects))
	for _, o := range next.parsed.objects {
		found[o.key] = true
	}
	return slices.ContainsFunc(old.parsed.objects, func(o object) bool { return !found[o.key] })
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
	s.keep(w, &r, now)
	s.good = now
	r.objects = s.objects()
	slices.SortStableFunc(r.errs, func(a, b DocumentError) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Field, b.Field))
	})
	slices.Sort(r.notes)
	r.notes = slices.Compact(r.notes)
	return r
}

// objects returns the last good form of every object, sorted by key.
func (s *source) objects() []object {
	out := make([]object, 0, len(s.good))
	for _, k := range slices.SortedFunc(mapKeys(s.good), compareKeys) {
		out = append(out, s.good[k])
	}
	return out
}

// keep adds to now the objects that were good and may be there still. If
// nothing at all is left, all of them stay unless empty is right: an empty
// directory is one that is being mounted or copied far more often than one
// that was emptied on purpose.
func (s *source) keep(w *walk, r *reading, now map[key]object) {
	broken, unnamed := map[key]bool{}, map[string]bool{}
	for name, f := range s.files {
		for k := range f.parsed.broken {
			broken[k] = true
		}
		unnamed[name] = f.parsed.unnamed
	}
	gone := map[key]time.Time{}
	for k, o := range s.good {
		other, ok := now[k]
		switch {
		// Another file has an object of this name, and counts only once the
		// file that counted so far is mended or gone.
		case ok && (other.file == o.file || !s.files[o.file].parsed.broken[k]):
		case broken[k], unnamed[o.file], w.hides(o.file):
			now[k] = o
			r.kept++
			r.markKept(o)
		case !ok && s.mayReturn(o):
			gone[k] = s.gone[k]
		}
	}
	if s.gone, s.first = gone, false; len(now) > 0 || len(s.good) == 0 || s.allowEmpty {
		for k := range gone {
			now[k] = s.good[k]
		}
		return
	}
	s.gone = map[key]time.Time{}
	maps.Copy(now, s.good)
	r.kept = len(now)
	r.errs = append(r.errs, DocumentError{File: rootName, Kept: true,
		Msg: "holds no object any more: bring the files back, or start with --allow-empty if that is meant"})
}

// mayReturn reports whether an object that is nowhere to be found counts all the same: its
// file may be on the way to another directory, or be written anew, as the others are that
// are there already. In the first reading of a process its file may be half written.
func (s *source) mayReturn(o object) bool {
	since, ok := s.gone[o.key]
	if _, there := s.files[o.file]; !ok && there && !s.first {
		return false
	}
	if !ok {
		since = time.Now()
		s.gone[o.key] = since
	}
	away := time.Since(since)
	return away < settleTime || time.Since(s.changed) < settleTime && away < maxSettleTime
}

// hides reports whether a file cannot be seen because it, or a directory
// above it, cannot be read.
func (w *walk) hides(file string) bool {
	for _, path := range w.unreadable {
		if file == path || strings.HasPrefix(file, path+"/") {
			return true
		}
	}
	return false
}

// markKept tells in the errors that stand for o that its last good form counts.
func (r *reading) markKept(o object) {
	for i := range r.errs {
		e := &r.errs[i]
		same := e.object == o.key || (e.object.name == "" && e.File == o.file)
		if same || strings.HasPrefix(o.file, e.File+"/") {
			e.Kept = true
		}
	}
}

func compareKeys(a, b key) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
}
