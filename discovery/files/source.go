package files

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	// maxUnequal is the number of reads in a row that may find different trees. After that, the last tree is used: there
	// may be a file that is written all the time.
	maxUnequal = 10
	// readEvery is the time between two reads of a directory that does not change. An edit is used after two such reads,
	// which is within a second. The reads are needed because the kernel (inotify) does not announce all changes, for
	// example not those of another machine in a network file system. A read of 1,000 files takes 2 ms.
	readEvery = 500 * time.Millisecond
	// slowRead is how long a read may take before it is reported as slow. A read of a network file system may never
	// return if its server cannot be reached.
	slowRead = 15 * time.Second
	// saveEvery is the least time between two writes of the last good objects: they can be tens of megabytes, and a
	// directory can change many times a second.
	saveEvery = 5 * time.Second
	// settleTime is how long a missing object stays in use after its file has changed. The file may be
	// half written, may be moved to another directory, or may be written again soon, as git and scripts do.
	settleTime = time.Second
	// maxSettleTime is how long a missing object stays in use if its file changes all the time.
	maxSettleTime = 10 * time.Second
	// rootName is the name of the directory itself in errors.
	rootName = "."
)

// Name is the name of the source.
const Name = "the configuration directory"

var errSlow = fmt.Errorf("reading takes longer than %v", slowRead)

// Config configures a [Source].
type Config struct {
	// Dir is the directory.
	Dir string
	// AllowEmpty permits that the directory, or a file or a directory below it, has no object. If it is
	// false, the last good objects of a file or directory that becomes empty stay in use.
	AllowEmpty bool
	// State is the directory in which the last good form of all objects is saved. If it is nil, none is saved.
	State *statedir.Dir
	// Debounce is the least time between two reads. A tree is used if two reads in a row find it.
	Debounce time.Duration
	// Changed is called after each change, from any goroutine. It must not block.
	Changed func()
	// Result is called after each step, such as [source.StepRead]. err is nil if the step succeeded.
	Result func(step string, err error)
	// Logger receives the logs.
	Logger *slog.Logger
}

// A Source follows the objects in a directory. Make one with [New], and call Run once.
type Source struct {
	cfg    Config
	outbox source.Outbox

	// The fields below are owned by the goroutine of Run.
	last    *tree                    // the tree of the last read; nil if the read failed
	unequal int                      // number of reads in a row that have found another tree than the previous read
	used    *tree                    // the tree whose objects are in use
	good    map[object.Key]located   // the last good form of each object in use
	missing map[object.Key]time.Time // objects in good that were not found, and since when
	next    time.Duration            // how long to wait for the next read
	merged  source.Reading           // the reading for the tree in use, without Changes
	unsaved bool                     // the file of last good objects is older than the field good
	saved   time.Time                // when that file was last written
}

// New returns the source of the objects in a directory. The directory must exist, unless the state directory has the
// last good objects.
func New(cfg Config) (*Source, error) {
	s := &Source{cfg: cfg, outbox: source.Outbox{Changed: cfg.Changed}}
	good, err := loadObjects(cfg.State)
	switch {
	case errors.Is(err, statedir.ErrDamaged):
		cfg.Logger.Error("the file of last good objects is damaged and was moved; objects in broken documents are left out", "error", err)
	case err != nil:
		return nil, err
	}
	s.outbox.Put(source.Reading{Changes: s.use(good)})
	if err := checkDir(cfg.Dir); err != nil {
		if len(good) == 0 {
			return nil, err
		}
		cfg.Logger.Error("serving the last good objects", "objects", len(good), "error", err)
	}
	return s, nil
}

// checkDir returns an error if path is no directory, or cannot be read.
func checkDir(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.IsDir() {
		return fmt.Errorf("configuration directory %q is a file: want a directory (--config-dir)", path)
	}
	if err == nil {
		_, err = os.ReadDir(path)
	}
	if err != nil {
		return fmt.Errorf("configuration directory %q: %s: create it, or name another (--config-dir)", path, plainError(err))
	}
	return nil
}

// Name returns the name of the source.
func (s *Source) Name() string { return Name }

// Status returns nil: the Errors of a [source.Reading] say what is wrong.
func (s *Source) Status() []source.Status { return nil }

// Read returns the changes since the last call. The caller must not change the objects.
func (s *Source) Read() source.Reading { return s.outbox.Read() }

// Run follows the directory until ctx ends.
func (s *Source) Run(ctx context.Context) {
	defer s.save()
	for next := time.Duration(0); clock.Sleep(ctx, next); {
		began := time.Now()
		next = s.step()
		if time.Since(s.saved) >= saveEvery {
			s.save()
		}
		next = max(next, s.cfg.Debounce, 4*time.Since(began)) // reads take a fifth of a processor at most
	}
}

// step reads the directory, and uses the tree if the previous read has found the same tree. It returns the
// least time until the next read.
func (s *Source) step() time.Duration {
	slow := time.AfterFunc(slowRead, func() { s.cfg.Result(source.StepRead, errSlow) })
	t, err := readTree(s.cfg.Dir, s.last)
	slow.Stop()
	if err != nil {
		s.cfg.Result(source.StepRead, fmt.Errorf("reading it (--config-dir): %w", err))
		s.last, s.unequal = nil, 0
		s.cannotRead(err)
		return readEvery
	}
	s.cfg.Result(source.StepRead, nil)
	same := t.equal(s.last)
	s.last = t
	if s.unequal++; !same && s.unequal < maxUnequal {
		return 0
	}
	s.unequal = 0
	var changes []hosts.Change
	if !t.equal(s.used) || len(s.missing) > 0 {
		changes = s.merge(t)
	}
	r := s.merged
	r.Changes = changes
	s.outbox.Put(r)
	return s.next
}

// cannotRead publishes why the directory cannot be read. The last good objects stay in use.
func (s *Source) cannotRead(err error) {
	r := s.merged
	r.Read, r.Kept = true, len(s.good)
	r.Errors = slices.Concat([]object.Error{{File: rootName, Msg: "cannot be read: " + plainError(err), Kept: r.Kept > 0}}, r.Errors)
	if r.Kept == 0 {
		r.Waiting = fmt.Sprintf("%s %s cannot be read: %s", Name, s.cfg.Dir, plainError(err))
	}
	s.missing = nil // while the directory cannot be read, no object counts as missing
	s.outbox.Put(r)
}

// A merge combines the objects of all files of a tree with the last good ones.
type merge struct {
	source.Reading
	inUse  map[object.Key]located
	parsed map[string]*parsed // by file
	broken map[object.Key]bool
	hidden map[string]bool // files and directories that could not be read, or that are treated as unreadable
}

// merge makes t the tree in use, decides which objects are in use, and returns the changes. An object that is missing
// because its document, file or directory is broken stays in use in its last good form.
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
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Document, b.Document), cmp.Compare(a.Field, b.Field))
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

// hideEmpty treats an empty file or directory as unreadable if objects in use came from it: the file may soon be
// written, or the file system of the directory may have been unmounted.
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
	for name, empty := range t.empty {
		if empty && held[name] {
			hide(name, "is empty: mount it again or bring its files back, or remove it if that is intended")
		}
	}
}

// add adds the objects of f, the file with the given name.
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
			m.Errors = append(m.Errors, object.Error{File: o.file, Document: o.document, Object: o.Key, Field: "metadata.name",
				Msg: fmt.Sprintf("is already in %s; this one is ignored", object.Place(first.file, first.document))})
			continue
		}
		m.inUse[o.Key] = o
	}
}

// keepGood keeps good objects in use that are broken now, that cannot be read, or that have been missing for less than
// the settle time. If a missing object was in a file that is written in place, keepGood keeps the objects that the file
// has in their good form, because the last of them may be half written. If no object at all is left, keepGood keeps
// all good objects, unless AllowEmpty is set: an empty directory is usually being mounted or copied.
func (s *Source) keepGood(m *merge, t *tree) {
	missing, writing := map[object.Key]time.Time{}, map[string]bool{}
	s.next = readEvery
	for k, o := range s.good {
		found, ok := m.inUse[k]
		p := m.parsed[o.file]
		switch {
		case ok && o.yieldsTo(found, p):
		case m.broken[k], p != nil && p.unnamed, m.hides(o.file):
			m.keep(o)
		default:
			missingSince, known := s.missing[k]
			if !known {
				missingSince = time.Now()
			}
			if left := remaining(missingSince, t.files[o.file]); left > 0 {
				missing[k], s.next = missingSince, min(s.next, left)
				writing[o.file] = t.files[o.file].sameInode(s.used.file(o.file))
			}
		}
	}
	s.missing = missing
	if len(m.inUse) > 0 || len(s.good) == 0 || s.cfg.AllowEmpty {
		for k, o := range s.good {
			_, waits := missing[k]
			if _, found := m.inUse[k]; waits || found && writing[o.file] {
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

// yieldsTo reports whether found is used instead of the good object o. An object of this name in another file is used
// only when the file that holds o, whose content is p, is repaired or removed.
func (o located) yieldsTo(found located, p *parsed) bool {
	return (!found.partial || o.partial) && (found.file == o.file || p == nil || !p.broken[o.Key])
}

// keep keeps the good object o in use, and sets Kept in the errors about it.
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

// hides reports whether a file, or a directory above it, could not be read.
func (m *merge) hides(file string) bool {
	for name := file; name != "."; name = path.Dir(name) {
		if m.hidden[name] {
			return true
		}
	}
	return false
}

// remaining returns how much longer a missing object stays in use. missingSince is when the object was found missing. f
// is the file that had the object, nil if the file was removed.
func remaining(missingSince time.Time, f *file) time.Duration {
	left := settleTime - time.Since(missingSince)
	if f != nil {
		left = min(max(left, settleTime-time.Since(f.stampSeen)), maxSettleTime-time.Since(missingSince))
	}
	return left
}

// use puts the objects in the parameter good into use, instead of the previous ones, and returns the changes.
func (s *Source) use(good map[object.Key]located) []hosts.Change {
	var c hosts.Change
	for key, o := range good {
		if old, ok := s.good[key]; !ok || old.Object != o.Object && !reflect.DeepEqual(old.Object, o.Object) {
			c.Updated = append(c.Updated, o.Object)
		}
	}
	for key := range s.good {
		if _, ok := good[key]; !ok {
			c.Removed = append(c.Removed, key)
		}
	}
	if s.good = good; len(c.Updated)+len(c.Removed) == 0 {
		return nil
	}
	return []hosts.Change{c}
}

// save saves the last good objects if they have changed.
func (s *Source) save() {
	if !s.unsaved || s.cfg.State == nil {
		return
	}
	s.saved = time.Now()
	err := saveObjects(s.cfg.State, s.good)
	s.unsaved = err != nil
	s.cfg.Result(source.StepSaveObjects, err)
}
