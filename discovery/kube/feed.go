package kube

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// A feed holds the objects of one resource. It is the store of a Reflector.
type feed struct {
	notify    func()     // called after each change, without the lock; must not block
	selection *selection // of namespaces whose objects count; nil for all
	structs   structs    // owned by the goroutine of the Reflector
	// strict is true if an object with errors is not used, and its last good form stays in use.
	// Then no table may be served before each object has a good form.
	strict bool

	mu      sync.Mutex
	objects map[object.Key]object.Object
	errs    map[object.Key][]object.Error
	revised int                 // how often errs has changed
	dirty   map[object.Key]bool // objects that have changed since the last call of take
	listed  bool                // all objects were listed once, or the API server does not have the resource
	synced  bool                // listed and, if strict is set, there was a time at which no object had errors
	dropped map[string]bool     // namespaces whose objects were dropped since the last list

	health
}

var _ cache.TransformingStore = (*feed)(nil)

// newFeed returns an empty feed of the resource with a name. The parameter n selects namespaces; nil selects all.
func newFeed(name string, n *selection, cfg source.ObjectsConfig) *feed {
	return &feed{
		notify: cfg.Changed, selection: n, objects: map[object.Key]object.Object{}, errs: map[object.Key][]object.Error{}, structs: structs{},
		dirty: map[object.Key]bool{}, dropped: map[string]bool{}, health: health{resource: name, log: cfg.Logger},
	}
}

// done ends a change of the feed: it releases the lock, and calls the function notify.
func (f *feed) done() {
	f.synced = f.synced || f.listed && (!f.strict || len(f.errs) == 0)
	f.mu.Unlock()
	f.notify()
}

// run keeps the feed in step with the resource until ctx ends. It first waits until it is known which
// namespaces count.
func (f *feed) run(ctx context.Context, l lister) {
	if f.selection != nil {
		select {
		case <-ctx.Done():
			return
		case <-f.selection.ready:
		}
	}
	syncStore(ctx, l, f, &f.health)
}

// Transformer makes client-go reduce objects one by one while it lists them. An object that has not changed is replaced
// by the same object in the feed, so the list needs no memory for it.
func (f *feed) Transformer() cache.TransformFunc {
	return func(whole any) (any, error) {
		reduced, err := f.reduce(whole)
		if s, ok := reduced.(*slim); ok {
			if old, ok := f.get(s.object.Key); ok && reflect.DeepEqual(old, s.object) {
				s.object = old
			}
		}
		return reduced, err
	}
}

// reduce returns the slim form of an object from client-go. If the object's namespace does not count, it returns a
// value of the type unselected.
func (f *feed) reduce(whole any) (any, error) {
	switch whole.(type) {
	case unselected, *slim:
		return whole, nil
	}
	o, err := meta.Accessor(whole)
	if err != nil {
		return nil, fmt.Errorf("unexpected object of type %T: %w", whole, err)
	}
	f.mu.Lock()
	selected := f.selectsLocked(o.GetNamespace())
	f.mu.Unlock()
	if !selected {
		return unselected{}, nil
	}
	return f.structs.reduce(whole)
}

// selectsLocked reports whether a namespace counts. If it does not, selectsLocked adds it to the field dropped. When
// the namespace counts later, reselect then lists the objects again. Both functions need the lock: otherwise reselect
// could miss a namespace.
func (f *feed) selectsLocked(namespace string) bool {
	if f.selection == nil || f.selection.current().include(namespace) {
		return true
	}
	f.dropped[strings.Clone(namespace)] = true
	return false
}

// reselect removes the objects of namespaces that do not count any more. It lists the resource again
// if a namespace whose objects were dropped counts now.
func (f *feed) reselect() {
	f.mu.Lock()
	for key := range f.objects {
		if !f.selectsLocked(key.Namespace) {
			f.removeLocked(key)
		}
	}
	f.keepErrsLocked(func(key object.Key) bool { return f.selectsLocked(key.Namespace) })
	names := f.selection.current()
	for namespace := range f.dropped {
		if !names.include(namespace) {
			continue
		}
		f.dropped = map[string]bool{}
		f.relist()
		break
	}
	f.mu.Unlock()
	f.notify()
}

// event reduces an object and calls the function applyLocked with it, if its namespace counts.
func (f *feed) event(whole any, applyLocked func(*slim)) error {
	reduced, err := f.reduce(whole)
	if err != nil {
		return err
	}
	if s, ok := reduced.(*slim); ok {
		f.mu.Lock()
		defer f.done()
		applyLocked(s)
	}
	return nil
}

// Add takes an object that is new or has changed.
func (f *feed) Add(whole any) error { return f.event(whole, f.putLocked) }

// Update does the same as Add.
func (f *feed) Update(whole any) error { return f.Add(whole) }

// putLocked applies an object.
func (f *feed) putLocked(s *slim) {
	key := s.object.Key
	if !f.selectsLocked(key.Namespace) {
		return
	}
	if f.setErrsLocked(key, s.errs); len(s.errs) > 0 && f.strict {
		return
	}
	if old, ok := f.objects[key]; ok && (old == s.object || reflect.DeepEqual(old, s.object)) {
		return // only fields that are not used have changed
	}
	f.objects[key], f.dirty[key] = s.object, true
}

// removeLocked removes an object.
func (f *feed) removeLocked(key object.Key) {
	f.setErrsLocked(key, nil)
	if _, ok := f.objects[key]; ok {
		delete(f.objects, key)
		f.dirty[key] = true
	}
}

// Delete removes an object.
func (f *feed) Delete(whole any) error {
	return f.event(whole, func(s *slim) { f.removeLocked(s.object.Key) })
}

// Replace replaces all objects of the feed by the objects in list.
func (f *feed) Replace(list []any, _ string) error {
	listed := make(map[object.Key]bool, len(list))
	var all []*slim
	for _, whole := range list {
		reduced, err := f.reduce(whole)
		if err != nil {
			return err
		}
		if s, ok := reduced.(*slim); ok {
			all = append(all, s)
			listed[s.object.Key] = true
		}
	}
	f.mu.Lock()
	defer f.done()
	for _, s := range all {
		f.putLocked(s)
	}
	f.removeOthersLocked(listed)
	f.listed = true
	return nil
}

// removeOthersLocked removes the objects whose keys are not in the parameter listed.
func (f *feed) removeOthersLocked(listed map[object.Key]bool) {
	for key := range f.objects {
		if !listed[key] {
			f.removeLocked(key)
		}
	}
	f.keepErrsLocked(func(key object.Key) bool { return listed[key] })
}

// setErrsLocked sets the errors of an object; it may have none.
func (f *feed) setErrsLocked(key object.Key, errs []object.Error) {
	if len(errs)+len(f.errs[key]) == 0 {
		return
	}
	f.revised++
	if delete(f.errs, key); len(errs) > 0 {
		f.errs[key] = errs
	}
}

// keepErrsLocked drops the errors of all objects for which the function keep returns false.
func (f *feed) keepErrsLocked(keep func(object.Key) bool) {
	before := len(f.errs)
	if maps.DeleteFunc(f.errs, func(key object.Key, _ []object.Error) bool { return !keep(key) }); len(f.errs) != before {
		f.revised++
	}
}

// Resync does nothing: the feed is always in step.
func (f *feed) Resync() error { return nil }

// absent empties the feed of a resource that the API server does not have.
func (f *feed) absent(ctx context.Context) {
	f.noteRequest(ctx, nil)
	f.mu.Lock()
	defer f.done()
	f.listed = true
	f.removeOthersLocked(nil)
}

// take adds to the map dirty the keys of the objects that have changed since the last call.
func (f *feed) take(dirty map[object.Key]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.Copy(dirty, f.dirty)
	clear(f.dirty)
}

// errorsRevised returns how often the errors in objects have changed.
func (f *feed) errorsRevised() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.revised
}

// addErrors appends the errors in objects to a list. It returns the list, and how often the errors have changed.
func (f *feed) addErrors(all []object.Error) ([]object.Error, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, errs := range f.errs {
		_, found := f.objects[key]
		for _, e := range errs {
			e.Kept = found && f.strict
			all = append(all, e)
		}
	}
	return all, f.revised
}

// get returns an object.
func (f *feed) get(key object.Key) (object.Object, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, ok := f.objects[key]
	return o, ok
}

// copyTo adds all objects to a map.
func (f *feed) copyTo(all map[object.Key]object.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.Copy(all, f.objects)
}

// status returns the state of the feed.
func (f *feed) status() source.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.health.status(len(f.objects), f.synced)
	for _, errs := range f.errs {
		if f.listed && !f.synced && s.Failure == "" {
			s.Failure, s.FailingSince = errs[0].Error(), s.Heard
		}
	}
	return s
}

// selectors returns the discovery selectors of the mesh; ok is false until they are known. The feed must be the one for
// the settings of the mesh.
func (f *feed) selectors() (selectors []string, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range f.objects {
		selectors = o.Mesh.Selectors
	}
	return selectors, f.synced
}

// unselected takes the place of an object whose namespace does not count.
type unselected struct{}
