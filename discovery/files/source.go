package files

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/clock"
)

const (
	// lookEvery is the time between two looks at the directory. The kernel (inotify) does not announce all changes, for
	// example not those of another machine in a network file system. A look at 1,000 files takes 2 ms.
	lookEvery = time.Second
	// maxUnequal is the number of looks in a row that may find something else than the look before. After that, what the
	// last one has found is used, except for the files that have changed again: one may be written all the time.
	maxUnequal = 10
	// slowRead is how long a step may take before it is reported as slow. A read of a network file system may never
	// return if its server cannot be reached.
	slowRead = 15 * time.Second
)

// Name is the name of the source.
const Name = "the configuration directory"

var (
	errBusy     = errors.New("it is being written")
	errSlow     = fmt.Errorf("reading takes longer than %v", slowRead)
	errNoObject = errors.New("holds no object any more: bring the files back, or start with --allow-empty if that is intended")
)

// Config configures a [Source].
type Config struct {
	// Dir is the directory.
	Dir string
	// AllowEmpty permits a directory without objects, and a file that has lost all of its objects. If it is false, the last
	// good objects stay in use.
	AllowEmpty bool
	// Debounce is the time between the first two looks. All later ones are a second apart.
	Debounce time.Duration
	// Changed is called after each change, from any goroutine. It must not block.
	Changed func()
	// Result is called with the result of each look; err is nil if the directory could be read.
	Result func(err error)
}

// A Source follows the objects in a directory. Make one with [New], and call Run once.
type Source struct {
	cfg    Config
	outbox source.Outbox

	// The fields below are owned by the goroutine of Run.
	last    *look                  // the last look
	unequal int                    // number of looks in a row that have found something else than the look before
	used    *look                  // the look that is in use
	files   map[string]*file       // in use, by name
	objects map[object.Key]located // in use
}

// New returns the source of the objects in a directory, which must exist.
func New(cfg Config) (*Source, error) {
	if _, err := os.ReadDir(cfg.Dir); err != nil {
		return nil, fmt.Errorf("configuration directory %q: %w: create it, or name another (--config-dir)", cfg.Dir, withoutPath(err))
	}
	return &Source{cfg: cfg, outbox: source.Outbox{Changed: cfg.Changed}}, nil
}

// Name returns the name of the source.
func (s *Source) Name() string { return Name }

// Status returns nil: the Errors of a [source.Reading] say what is wrong.
func (s *Source) Status() []source.Status { return nil }

// Read returns the changes since the last call. The caller must not change the objects.
func (s *Source) Read() source.Reading { return s.outbox.Read() }

// Run follows the directory until ctx ends.
func (s *Source) Run(ctx context.Context) {
	s.step()
	for next := s.cfg.Debounce; clock.Sleep(ctx, next); next = lookEvery {
		s.step()
	}
}

// step looks at the directory. What it finds is used if the look before has found the same, so that hardly any file is
// half written, and files that are replaced one after the other are used together.
func (s *Source) step() {
	slow := time.AfterFunc(slowRead, func() { s.cfg.Result(errSlow) })
	defer slow.Stop()
	before, now := s.last, newLook(s.cfg.Dir)
	s.last = now
	s.cfg.Result(now.failed[rootName])
	if s.unequal++; !now.equal(before) && s.unequal < maxUnequal {
		return
	}
	s.unequal = 0
	if now.equal(s.used) {
		return
	}
	contents := s.readChanged(before, now)
	slow.Stop()
	s.use(now, contents)
}

// readChanged reads the files that have changed, but not since the look before. It notes in now which it could not read;
// the next look without this note begins another attempt.
func (s *Source) readChanged(before, now *look) (contents map[string][]byte) {
	contents = map[string][]byte{}
	for name, stamp := range now.files {
		if old := s.files[name]; old != nil && old.stamp == stamp || now.hiding(name) != "" {
			continue
		}
		data, err := now.read(s.cfg.Dir, name)
		if err == nil && before.files[name] != stamp {
			err = errBusy
		}
		if err != nil {
			now.fail(name, err)
			continue
		}
		contents[name] = data
	}
	return contents
}

// use puts what a look has found into use. If no object is left, all that was in use stays, unless AllowEmpty is set: an
// empty directory is usually being mounted or copied.
func (s *Source) use(now *look, contents map[string][]byte) {
	files := s.found(now, contents)
	objects, errs := collect(files)
	if len(objects) == 0 && len(s.objects) > 0 && !s.cfg.AllowEmpty {
		now.failed[rootName] = errNoObject
		files, objects = s.files, s.objects
	}
	r := source.Reading{Read: true, Errors: errs}
	hiding := map[string]bool{}
	for name, f := range files {
		by := now.hiding(name)
		hiding[by] = true
		if by != "" || f.kept {
			r.Kept += len(f.objects)
		}
		for _, note := range f.notes {
			r.Notes = append(r.Notes, name+": "+note)
		}
	}
	for name, err := range now.failed {
		r.Errors = append(r.Errors, object.Error{File: name, Msg: err.Error(), Kept: hiding[name]})
	}
	slices.SortStableFunc(r.Errors, func(a, b object.Error) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Document, b.Document), cmp.Compare(a.Field, b.Field))
	})
	slices.Sort(r.Notes)
	r.Notes = slices.Compact(r.Notes)
	switch {
	case now.isPart() && r.Kept == 0:
		r.Waiting = fmt.Sprintf("a part of %s %s cannot be read: see /debug/errors", Name, s.cfg.Dir)
	case len(objects) == 0 && !s.cfg.AllowEmpty:
		r.Waiting = fmt.Sprintf("%s %s holds no usable object: add one, or start with --allow-empty if that is intended", Name, s.cfg.Dir)
	}
	s.used, s.files = now, files
	r.Changes = s.put(objects)
	s.outbox.Put(r)
}

// found returns the files after a look. A file that something hides stays as it was.
func (s *Source) found(now *look, contents map[string][]byte) map[string]*file {
	files := map[string]*file{}
	for name, f := range s.files {
		if _, found := now.files[name]; found || now.hiding(name) != "" {
			files[name] = f
		}
	}
	for name, data := range contents {
		files[name] = s.files[name].after(name, now.files[name], data, s.cfg.AllowEmpty)
	}
	return files
}

// collect returns the objects of files, and what is wrong with the files. If several files have an object, the first one
// by name counts.
func collect(files map[string]*file) (objects map[object.Key]located, errs []object.Error) {
	objects = map[object.Key]located{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		errs = append(errs, files[name].wrong...)
		for _, o := range files[name].objects {
			if first, ok := objects[o.Key]; ok {
				errs = append(errs, object.Error{File: o.file, Document: o.document, Object: o.Key, Field: "metadata.name",
					Msg: fmt.Sprintf("is already in %s; this one is ignored", object.Place(first.file, first.document))})
				continue
			}
			objects[o.Key] = o
		}
	}
	return objects, errs
}

// put puts objects into use, instead of the previous ones, and returns the changes.
func (s *Source) put(objects map[object.Key]located) []hosts.Change {
	var c hosts.Change
	for key, o := range objects {
		if old, ok := s.objects[key]; !ok || old.Object != o.Object && !reflect.DeepEqual(old.Object, o.Object) {
			c.Updated = append(c.Updated, o.Object)
		}
	}
	for key := range s.objects {
		if _, ok := objects[key]; !ok {
			c.Removed = append(c.Removed, key)
		}
	}
	if s.objects = objects; len(c.Updated)+len(c.Removed) == 0 {
		return nil
	}
	return []hosts.Change{c}
}

// A file is a file in use, with its last good content. If no good content was seen yet, it has what is right of the
// content that was read last. Files do not change.
type file struct {
	*parsed
	good  bool           // nothing is wrong with the content in use
	kept  bool           // the content in use is older than the one that was read last
	stamp stamp          // of the content that was read last
	wrong []object.Error // what is wrong with that content
}

// after returns the file with a new content. f may be nil. A content without objects is not good if f has objects, unless
// allowEmpty is true: a program whose output goes to the file may have only begun, or have failed.
func (f *file) after(name string, stamp stamp, data []byte, allowEmpty bool) *file {
	p := parseFile(name, data)
	now := &file{parsed: p, good: len(p.errs) == 0, stamp: stamp, wrong: p.errs}
	empty := len(now.objects)+len(now.notes) == 0 && !allowEmpty
	if f == nil || !f.good || len(f.objects) == 0 || now.good && !empty {
		return now
	}
	kept := *f
	kept.stamp, kept.kept, kept.wrong = stamp, true, now.wrong
	if now.good {
		kept.wrong = []object.Error{{File: name, Msg: "holds no object any more: write it again, or remove it if that is intended"}}
	}
	for i := range kept.wrong {
		kept.wrong[i].Kept = true
		kept.wrong[i].Msg += "; the whole file stays in use as it was before"
	}
	return &kept
}
