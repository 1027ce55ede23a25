package files

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

const (
	// settleTime is how long an object that is missing stays in use after its file has changed. The file may be
	// half written, on the way to another directory, or about to be written again, as git and scripts do.
	settleTime = time.Second
	// maxSettleTime bounds that, if the file changes all the time.
	maxSettleTime = 10 * time.Second
)

// located is an object with the place where it is.
type located struct {
	object.Object
	file string
	line int
	text *chunk // the document that holds it
}

// A merge combines the objects of all files of a tree with the last good ones.
type merge struct {
	source.Reading
	inUse  map[object.Key]located
	parsed map[string]*parsed // by file
	broken map[object.Key]bool
	hidden map[string]bool // files and directories whose objects cannot be seen
}

// merge decides which objects are in use when a tree is, and returns what has changed. An object that is missing
// because something is broken stays in use in its last good form.
func (s *Source) merge(t *tree) []hosts.Change {
	m := merge{
		Reading: source.Reading{Read: true, Errors: slices.Clone(t.errs)}, inUse: make(map[object.Key]located, len(s.good)),
		parsed: map[string]*parsed{}, broken: map[object.Key]bool{}, hidden: map[string]bool{},
	}
	for _, e := range t.errs {
		m.hidden[e.File] = true
	}
	if !s.cfg.AllowEmpty {
		m.hideEmpty(t, s.good)
	}
	for _, name := range slices.Sorted(maps.Keys(t.files)) {
		m.add(name, t.files[name])
	}
	s.keepGood(&m, t)
	slices.SortStableFunc(m.Errors, func(a, b object.Error) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Field, b.Field))
	})
	slices.Sort(m.Notes)
	m.Notes = slices.Compact(m.Notes)
	switch {
	case len(m.inUse) == 0 && !s.cfg.AllowEmpty:
		m.Waiting = fmt.Sprintf("%s %s holds no usable object: add one, or start with --allow-empty if that is intended", Name, s.cfg.Dir)
	case t.transient && m.Kept == 0:
		m.Waiting = fmt.Sprintf("a part of %s %s could not be read: see /debug/errors", Name, s.cfg.Dir)
	}
	s.used, s.merged, s.unsaved = t, m.Reading, true
	return s.use(m.inUse)
}

// hideEmpty treats a file or a directory as unreadable if objects came from it and it is empty: a file is
// about to be written, the file system of a directory was unmounted.
func (m *merge) hideEmpty(t *tree, good map[object.Key]located) {
	held := map[string]bool{}
	for _, o := range good {
		for name := o.file; name != "." && !held[name]; name = path.Dir(name) {
			held[name] = true
		}
	}
	hide := func(name, msg string) {
		m.hidden[name] = true
		m.Errors = append(m.Errors, object.Error{File: name, Msg: msg})
	}
	for name, f := range t.files {
		if len(f.data) == 0 && held[name] {
			hide(name, "is empty: write it again, or remove it if that is intended")
		}
	}
	for name, d := range t.dirs {
		if d.empty && held[name] {
			hide(name, "is empty: mount it again or bring its files back, or remove it if that is intended")
		}
	}
}

// add adds the objects of a file.
func (m *merge) add(name string, f *file) {
	if f.parsed == nil {
		f.parsed = parseFile(name, f.data)
	}
	p := f.parsed
	m.parsed[name] = p
	maps.Copy(m.broken, p.broken)
	m.Errors = append(m.Errors, p.errs...)
	for _, note := range p.notes {
		m.Notes = append(m.Notes, name+": "+note)
	}
	for _, o := range p.objects {
		if first, ok := m.inUse[o.Key]; ok {
			m.Errors = append(m.Errors, object.Error{File: o.file, Line: o.line, Field: "metadata.name",
				Msg: fmt.Sprintf("%s is already in %s:%d; this one is ignored", o.Key, first.file, first.line)})
			continue
		}
		m.inUse[o.Key] = o
	}
}

// keepGood adds the good objects that are broken, that cannot be seen now, or that are missing and have not settled,
// the latter with all others of a file that is written in place: the last one in it may be half written.
// If no object at all is left, it keeps all of them unless AllowEmpty is set: an empty directory is usually one
// that is being mounted or copied.
func (s *Source) keepGood(m *merge, t *tree) {
	missing, writing := map[object.Key]time.Time{}, map[string]bool{}
	s.next = rescanEvery
	for k, o := range s.good {
		found, ok := m.inUse[k]
		of := m.parsed[o.file]
		switch {
		// An object of this name in another file is used only when the file that holds the object in use is
		// repaired or removed.
		case ok && (found.file == o.file || of == nil || !of.broken[k]):
		case m.broken[k], of != nil && of.unnamed, m.hides(o.file):
			m.keep(o)
		default:
			since, known := s.missing[k]
			if !known {
				since = time.Now()
			}
			if left := settles(since, t.files[o.file]); left > 0 {
				missing[k], s.next = since, min(s.next, left)
				writing[o.file] = t.files[o.file].sameInode(s.used.file(o.file))
			}
		}
	}
	s.missing = missing
	if len(m.inUse) > 0 || len(s.good) == 0 || s.cfg.AllowEmpty {
		for k, o := range s.good {
			if _, ok := missing[k]; ok || writing[o.file] {
				m.inUse[k] = o
			}
		}
		return
	}
	s.missing = nil
	maps.Copy(m.inUse, s.good)
	m.Kept = len(m.inUse)
	m.Errors = append(m.Errors, object.Error{File: rootName, Kept: true,
		Msg: "holds no object any more: bring the files back, or start with --allow-empty if that is intended"})
}

// keep keeps a good object in use, and marks the errors about it.
func (m *merge) keep(o located) {
	m.inUse[o.Key] = o
	m.Kept++
	for i := range m.Errors {
		e := &m.Errors[i]
		same := e.Object == o.Key || (e.Object.Name == "" && e.File == o.file)
		if same || strings.HasPrefix(o.file, e.File+"/") {
			e.Kept = true
		}
	}
}

// hides reports whether a file could not be seen because it, or a directory above it, could not be read.
func (m *merge) hides(file string) bool {
	for name := file; name != "."; name = path.Dir(name) {
		if m.hidden[name] {
			return true
		}
	}
	return false
}

// settles returns how long until an object is removed that is missing since a time; f is the file that it was in.
func settles(since time.Time, f *file) time.Duration {
	left := settleTime - time.Since(since)
	if f != nil {
		left = min(max(left, settleTime-time.Since(f.since)), maxSettleTime-time.Since(since))
	}
	return left
}
