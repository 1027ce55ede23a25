package files

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/statedir"
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
	// saveEvery is the least time between two writes of the last good objects: they can be tens of megabytes, and a
	// directory can change every second.
	saveEvery = 5 * time.Second
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
	// State is the directory in which the last good contents of files are saved. If it is nil, none are saved.
	State *statedir.Dir
	// Debounce is the time between the first two looks. All later ones are a second apart.
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
	last    *look                  // the last look
	unequal int                    // number of looks in a row that have found something else than the look before
	used    *look                  // the look that is in use
	files   map[string]*file       // in use, by name
	objects map[object.Key]located // in use
	unsaved bool                   // what was saved is older than files
	saved   time.Time              // when files was last saved
}

// New returns the source of the objects in a directory. The directory must exist, unless the state directory has the
// last good objects.
func New(cfg Config) (*Source, error) {
	s := &Source{cfg: cfg, outbox: source.Outbox{Changed: cfg.Changed}}
	var err error
	s.files, err = load(cfg.State)
	switch {
	case errors.Is(err, statedir.ErrDamaged):
		cfg.Logger.Error("the file of last good objects is damaged and was moved; objects in broken files are left out", "error", err)
	case err != nil:
		return nil, err
	}
	objects, _ := collect(s.files)
	s.outbox.Put(source.Reading{Changes: s.put(objects)})
	if _, err := os.ReadDir(cfg.Dir); err != nil {
		err = fmt.Errorf("configuration directory %q: %w: create it, or name another (--config-dir)", cfg.Dir, withoutPath(err))
		if len(objects) == 0 {
			return nil, err
		}
		cfg.Logger.Error("serving the last good objects", "objects", len(objects), "error", err)
	}
	return s, nil
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
	s.step()
	for next := s.cfg.Debounce; clock.Sleep(ctx, next); next = lookEvery {
		s.step()
		if time.Since(s.saved) >= saveEvery {
			s.save()
		}
	}
}

// step looks at the directory. What it finds is used if the look before has found the same, so that hardly any file is
// half written, and files that are replaced one after the other are used together.
func (s *Source) step() {
	slow := time.AfterFunc(slowRead, func() { s.cfg.Result(source.StepRead, errSlow) })
	defer slow.Stop()
	before, now := s.last, newLook(s.cfg.Dir)
	s.last = now
	s.cfg.Result(source.StepRead, now.failed[rootName])
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
	s.used, s.files, s.unsaved = now, files, true
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

// save saves the last good contents if they have changed.
func (s *Source) save() {
	if !s.unsaved || s.cfg.State == nil {
		return
	}
	s.saved = time.Now()
	err := save(s.cfg.State, s.files)
	s.unsaved = err != nil
	s.cfg.Result(source.StepSaveObjects, err)
}
