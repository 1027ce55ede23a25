package files

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	// rescanEvery is when the directory is read if no change is announced. It catches what the kernel does
	// not report: network file systems, links, mounts, and a parent directory that was replaced.
	rescanEvery = time.Second
	// maxUnequal is how many reads in a row may find another tree before it is used all the same: some file
	// may be written all the time.
	maxUnequal = 10
	// slowRead is when a read is reported as slow. A network file system whose server is away may never
	// return.
	slowRead = 15 * time.Second
	// saveEvery bounds how often the last good objects are written: they can be tens of megabytes, and a
	// directory can change many times a second.
	saveEvery = 5 * time.Second
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
	// AllowEmpty permits a directory, and files and directories below it, without any object. If it is
	// false, what becomes empty keeps its last good objects.
	AllowEmpty bool
	// State is the directory in which the last good form of all objects is saved; nil for none.
	State *statedir.Dir
	// Debounce is the time between two reads that must find the same.
	Debounce time.Duration
	// Changed is called after each change, from any goroutine. It must not block.
	Changed func()
	// Result is called with the result of each step, see [source.StepRead] and others; nil if it succeeded.
	Result func(step string, err error)
	// Logger is for logs.
	Logger *slog.Logger
}

// A Source follows the objects in a directory. Make one with [New], and call Run once.
type Source struct {
	cfg Config
	out source.Outbox

	// The fields below are owned by the goroutine of Run.
	watcher watcher
	last    *tree                    // of the last read
	unequal int                      // reads in a row that found another tree
	used    *tree                    // whose objects are in use
	good    map[object.Key]located   // the last good form of each object in use
	missing map[object.Key]time.Time // objects in good that were not found, and since when
	next    time.Duration            // when to look whether they still are missing, or to read again
	merged  source.Reading           // that follows from used, without Changes
	unsaved bool                     // the file of last good objects is older than good
	saved   time.Time                // when that file was last written
}

// New returns the objects in a directory. It must exist, unless the state directory has the last good
// objects.
func New(cfg Config) (*Source, error) {
	s := &Source{cfg: cfg, out: source.Outbox{Changed: cfg.Changed}, watcher: watcher{root: cfg.Dir}}
	good, err := loadObjects(cfg.State)
	switch {
	case errors.Is(err, statedir.ErrDamaged):
		cfg.Logger.Error("the file of last good objects is damaged and was moved; objects in broken documents are left out", "error", err)
	case err != nil:
		return nil, err
	}
	s.out.Put(source.Reading{Changes: s.use(good)})
	if err := checkDir(cfg.Dir); err != nil {
		if len(good) == 0 {
			return nil, err
		}
		cfg.Logger.Error("serving the last good objects", "objects", len(good), "error", err)
	}
	return s, nil
}

// checkDir returns an error if a directory cannot be read.
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

// Status returns nothing: Errors of a [source.Reading] say what is wrong.
func (s *Source) Status() []source.Status { return nil }

// Read returns what has changed since the last call. The caller must not change the objects.
func (s *Source) Read() source.Reading { return s.out.Read() }

// Run follows the directory until ctx ends.
func (s *Source) Run(ctx context.Context) {
	defer s.watcher.close()
	defer s.save()
	for ctx.Err() == nil {
		began := time.Now()
		next := s.step()
		if s.last != nil { // before the next read, which must find the same
			s.cfg.Result(source.StepWatch, s.watcher.follow(s.last.dirs))
		}
		if time.Since(s.saved) >= saveEvery {
			s.save()
		}
		s.watcher.wait(ctx, max(s.cfg.Debounce, time.Since(began)), next)
	}
}

// step reads the directory, and uses what it has found if the last read has found the same. It returns when
// to read again if no change is announced.
func (s *Source) step() time.Duration {
	slow := time.AfterFunc(slowRead, func() { s.cfg.Result(source.StepRead, errSlow) })
	t, err := readTree(s.cfg.Dir, s.last)
	slow.Stop()
	if err != nil {
		s.cfg.Result(source.StepRead, fmt.Errorf("reading it (--config-dir): %w", err))
		s.last, s.unequal = nil, 0
		s.cannotRead(err)
		return rescanEvery
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
	s.out.Put(r)
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
	s.missing = nil // the time does not count
	s.out.Put(r)
}

// use takes good as the objects in use, and returns what has changed.
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
