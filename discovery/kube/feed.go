package kube

import (
	"context"
	"log/slog"
	"maps"
	"reflect"
	"sync"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/object"
)

// A feed holds the objects of one resource. It is the store of a Reflector.
type feed struct {
	changed func() // called after each change, without the lock; must not block

	mu      sync.Mutex
	objects map[object.Key]object.Object // the last good form of each
	broken  map[object.Key][]object.Error
	dirty   map[object.Key]bool // objects that have changed since they were taken
	synced  bool                // all objects were listed once, or there can be none
	latest  time.Time           // when the API server last sent something

	health
}

// health knows whether requests for a resource succeed, and logs when that changes.
type health struct {
	what string // the resource
	log  *slog.Logger

	mu      sync.Mutex
	failure error     // of the last request; nil if it succeeded
	since   time.Time // when requests began to fail; zero without a failure
	logged  string    // the last failure that was logged and has not ended
}

// asked notes the result of a request, unless ctx has ended. The end of a failure is certain when
// the API server has sent something, see heard.
func (h *health) asked(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		h.since = time.Time{}
	case h.failure == nil:
		h.since = time.Now()
	}
	if h.failure = err; err != nil && err.Error() != h.logged {
		h.logged = err.Error()
		h.log.Error("cannot read from the Kubernetes API; the objects stay as they are", "what", h.what, "error", err)
	}
}

// heard notes that the API server has sent something.
func (h *health) heard() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.logged != "" {
		h.logged = ""
		h.log.Info("reading from the Kubernetes API again", "what", h.what)
	}
}

// failing returns since when requests fail, and why; nil if they succeed.
func (h *health) failing() (since time.Time, why error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.since, h.failure
}

var (
	_ cache.TransformingStore      = (*feed)(nil)
	_ cache.ReflectorBookmarkStore = (*feed)(nil)
)

// newFeed returns an empty feed of a resource.
func newFeed(what string, cfg Config) *feed {
	return &feed{
		changed: cfg.Changed, objects: map[object.Key]object.Object{}, broken: map[object.Key][]object.Error{},
		dirty: map[object.Key]bool{}, health: health{what: what, log: cfg.Logger},
	}
}

// done ends a change of the feed: it releases the lock.
func (f *feed) done() {
	f.latest = time.Now()
	f.mu.Unlock()
	f.heard()
	f.changed()
}

// Transformer makes client-go reduce objects one by one while it lists them.
func (f *feed) Transformer() cache.TransformFunc {
	return func(whole any) (any, error) { return reduce(whole) }
}

// Add takes an object that is new or has changed.
func (f *feed) Add(whole any) error {
	s, err := reduce(whole)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.done()
	f.putLocked(s)
	return nil
}

// Update is Add.
func (f *feed) Update(whole any) error { return f.Add(whole) }

// putLocked puts an object to use. One that has errors stays in its last good form.
func (f *feed) putLocked(s *slim) {
	key := s.object.Key
	if len(s.errs) > 0 {
		f.broken[key] = s.errs
		return
	}
	delete(f.broken, key)
	if old, ok := f.objects[key]; ok && reflect.DeepEqual(old, s.object) {
		return // what has changed is of no use here
	}
	f.objects[key], f.dirty[key] = s.object, true
}

// removeLocked removes an object.
func (f *feed) removeLocked(key object.Key) {
	delete(f.broken, key)
	if _, ok := f.objects[key]; ok {
		delete(f.objects, key)
		f.dirty[key] = true
	}
}

// Delete removes an object.
func (f *feed) Delete(whole any) error {
	s, err := reduce(whole)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.done()
	f.removeLocked(s.object.Key)
	return nil
}

// Replace makes a list the objects of the feed.
func (f *feed) Replace(list []any, _ string) error {
	listed := make(map[object.Key]bool, len(list))
	reduced := make([]*slim, len(list))
	for i, whole := range list {
		s, err := reduce(whole)
		if err != nil {
			return err
		}
		reduced[i], listed[s.object.Key] = s, true
	}
	f.mu.Lock()
	defer f.done()
	f.synced = true
	for _, s := range reduced {
		f.putLocked(s)
	}
	f.removeOthersLocked(listed)
	return nil
}

// removeOthersLocked removes the objects that are not listed.
func (f *feed) removeOthersLocked(listed map[object.Key]bool) {
	for key := range f.objects {
		if !listed[key] {
			f.removeLocked(key)
		}
	}
	maps.DeleteFunc(f.broken, func(key object.Key, _ []object.Error) bool { return !listed[key] })
}

// Resync does nothing: the feed is always in step.
func (f *feed) Resync() error { return nil }

// Bookmark notes that the API server has sent everything up to now.
func (f *feed) Bookmark(string) error {
	f.mu.Lock()
	f.latest = time.Now()
	f.mu.Unlock()
	f.heard()
	return nil
}

// absent empties the feed of a resource that the API server does not have.
func (f *feed) absent() {
	f.asked(context.Background(), nil)
	f.mu.Lock()
	defer f.done()
	f.synced = true
	f.removeOthersLocked(nil)
}

// take adds the objects that have changed since the last call to dirty, and the errors to errs.
func (f *feed) take(dirty map[object.Key]bool, errs []object.Error) []object.Error {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.Copy(dirty, f.dirty)
	clear(f.dirty)
	for key, broken := range f.broken {
		_, kept := f.objects[key]
		for _, e := range broken {
			e.Kept = kept
			errs = append(errs, e)
		}
	}
	return errs
}

// get returns an object.
func (f *feed) get(key object.Key) (object.Object, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, ok := f.objects[key]
	return o, ok
}

// status returns the state of the feed; h is that of its requests.
func (f *feed) status(h *health) Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := Status{Resource: f.what, Objects: len(f.objects), Synced: f.synced, Heard: f.latest}
	if since, why := h.failing(); why != nil {
		s.Failure, s.FailingSince = why.Error(), since
	}
	return s
}

// waiting returns why the feed does not have all objects yet, or an empty string.
func (s Status) waiting() string {
	switch {
	case s.Synced:
		return ""
	case s.Failure != "":
		return s.Resource + " cannot be read: " + s.Failure
	}
	return s.Resource + " are being read"
}
