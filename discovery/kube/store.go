package kube

import (
	"context"
	"log/slog"
	"maps"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/logonce"
)

// A reading is what was read of an object.
type reading[T any] struct {
	meta  decode.Meta
	value *T // nil if the object cannot be used
	errs  []object.Error
}

// A store holds a value for each object of a resource. It is the store of a Reflector. Values do not change.
type store[T any] struct {
	resource  resource
	decode    func([]byte) reading[T] // decodes the JSON of an object
	log       *slog.Logger
	changed   func()        // called after each change, without the lock; must not block
	revised   *atomic.Int64 // counts the changes of errs
	selection *selection    // of namespaces whose objects count; nil for all
	// strict is true if the last value of an object stays when the object cannot be used any more.
	// Then no table may be served before each object can be used.
	strict bool

	mu      sync.Mutex
	values  map[object.Key]*T
	errs    map[object.Key][]object.Error
	dirty   map[object.Key]bool // objects that have changed since the last call of take; nil if it is never called
	listed  bool                // all objects were listed once, or the API server does not have the resource
	synced  bool                // listed and, if strict is set, there was a time at which no object had errors
	dropped map[string]bool     // namespaces whose objects were dropped since the last list
	relist  func()              // lists the objects again; nil before run

	failure      error           // of the last request; nil if it succeeded
	failingSince time.Time       // when requests began to fail; only meaningful with a failure
	logged       logonce.Failure // the failure that was logged
	heard        time.Time       // when a request last succeeded
}

var _ cache.ReflectorStore = (*store[bool])(nil)

// newStore returns the empty store of a resource.
func newStore[T any](r resource, log *slog.Logger, changed func(), decode func([]byte) reading[T]) *store[T] {
	return &store[T]{
		resource: r, decode: decode, log: log, changed: changed, revised: new(atomic.Int64),
		values: map[object.Key]*T{}, errs: map[object.Key][]object.Error{}, dropped: map[string]bool{},
	}
}

// done ends a change of the store: it releases the lock, and calls the function changed.
func (s *store[T]) done() {
	s.synced = s.synced || s.listed && (!s.strict || len(s.errs) == 0)
	s.mu.Unlock()
	s.changed()
}

// An item is an object on its way from the API server to a store.
type item[T any] struct {
	key     object.Key
	version string
	last    bool // a bookmark that says that all objects were sent
	dropped bool // the namespace does not count
	value   *T
	errs    []object.Error
}

// GetObjectKind returns no kind: all items of a store have the same.
func (i *item[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns i, which does not change.
func (i *item[T]) DeepCopyObject() runtime.Object { return i }

// GetObjectMeta returns the part of the metadata that client-go uses.
func (i *item[T]) GetObjectMeta() metav1.Object {
	m := &metav1.ObjectMeta{Namespace: i.key.Namespace, Name: i.key.Name, ResourceVersion: i.version}
	if i.last {
		m.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return m
}

// newItem returns the item for the JSON of an object. If the object has not changed, it has the value that the store
// holds, so a list of all objects needs little memory.
func (s *store[T]) newItem(data []byte) *item[T] {
	r := s.decode(data)
	i := &item[T]{
		key:     object.Key{Kind: s.resource.kind, Namespace: r.meta.Namespace, Name: r.meta.Name},
		version: r.meta.ResourceVersion, last: r.meta.Annotations[metav1.InitialEventsAnnotationKey] == "true",
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i.dropped = !s.selectsLocked(i.key.Namespace); i.dropped {
		return i
	}
	i.value, i.errs = r.value, r.errs
	for n := range i.errs {
		i.errs[n].File = i.key.String()
	}
	if old := s.values[i.key]; old != nil && reflect.DeepEqual(old, i.value) {
		i.value = old
	}
	return i
}

// selectsLocked reports whether a namespace counts. If it does not, selectsLocked adds it to the field dropped. When
// the namespace counts later, reselect then lists the objects again. Both functions need the lock: otherwise reselect
// could miss a namespace.
func (s *store[T]) selectsLocked(namespace string) bool {
	if s.selection == nil || s.selection.current().include(namespace) {
		return true
	}
	s.dropped[namespace] = true
	return false
}

// reselect removes the objects of namespaces that do not count any more. It lists the resource again
// if a namespace whose objects were dropped counts now.
func (s *store[T]) reselect() {
	s.mu.Lock()
	defer s.done()
	s.keepLocked(func(key object.Key) bool { return s.selectsLocked(key.Namespace) })
	names := s.selection.current()
	for namespace := range s.dropped {
		if names.include(namespace) {
			if s.dropped = map[string]bool{}; s.relist != nil {
				s.relist()
			}
			return
		}
	}
}

// Add takes an object that is new or has changed.
func (s *store[T]) Add(o any) error {
	s.mu.Lock()
	defer s.done()
	s.putLocked(o.(*item[T])) //nolint:forcetypeassert // from newItem
	return nil
}

// Update does the same as Add.
func (s *store[T]) Update(o any) error { return s.Add(o) }

// Delete removes an object.
func (s *store[T]) Delete(o any) error {
	s.mu.Lock()
	defer s.done()
	s.removeLocked(o.(*item[T]).key) //nolint:forcetypeassert // from newItem
	return nil
}

// Replace replaces all objects of the store by the objects in list.
func (s *store[T]) Replace(list []any, _ string) error {
	s.noteRequest(context.Background(), nil)
	s.mu.Lock()
	defer s.done()
	listed := make(map[object.Key]bool, len(list))
	for _, o := range list {
		i := o.(*item[T]) //nolint:forcetypeassert // from newItem
		listed[i.key] = true
		s.putLocked(i)
	}
	s.keepLocked(func(key object.Key) bool { return listed[key] })
	s.listed = true
	return nil
}

// Resync does nothing: the store is always in step.
func (s *store[T]) Resync() error { return nil }

// putLocked applies an object.
func (s *store[T]) putLocked(i *item[T]) {
	switch old := s.values[i.key]; {
	case i.dropped || !s.selectsLocked(i.key.Namespace):
		s.removeLocked(i.key)
		return
	case i.value == nil && !s.strict:
		s.removeLocked(i.key)
	case i.value != nil && (old == nil || old != i.value && !reflect.DeepEqual(old, i.value)): // otherwise only unused fields have changed
		s.values[i.key] = i.value
		s.noteLocked(i.key)
	}
	s.setErrsLocked(i.key, i.errs)
}

// removeLocked removes an object.
func (s *store[T]) removeLocked(key object.Key) {
	s.setErrsLocked(key, nil)
	if s.values[key] != nil {
		delete(s.values, key)
		s.noteLocked(key)
	}
}

// noteLocked notes that an object has changed.
func (s *store[T]) noteLocked(key object.Key) {
	if s.dirty != nil {
		s.dirty[key] = true
	}
}

// keepLocked removes the objects for which the function keep returns false.
func (s *store[T]) keepLocked(keep func(object.Key) bool) {
	for key := range s.values {
		if !keep(key) {
			s.removeLocked(key)
		}
	}
	for key := range s.errs { // also of objects without a value
		if !keep(key) {
			s.setErrsLocked(key, nil)
		}
	}
}

// setErrsLocked sets the errors of an object; it may have none.
func (s *store[T]) setErrsLocked(key object.Key, errs []object.Error) {
	if len(errs)+len(s.errs[key]) == 0 {
		return
	}
	s.revised.Add(1)
	if delete(s.errs, key); len(errs) > 0 {
		s.errs[key] = errs
	}
}

// take adds to the map dirty the keys of the objects that have changed since the last call.
func (s *store[T]) take(dirty map[object.Key]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(dirty, s.dirty)
	clear(s.dirty)
}

// addErrors appends the errors in objects to a list.
func (s *store[T]) addErrors(all []object.Error) []object.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, errs := range s.errs {
		for _, e := range errs {
			e.Kept = s.strict && s.values[key] != nil
			all = append(all, e)
		}
	}
	return all
}

// get returns the value of an object; nil if there is none.
func (s *store[T]) get(key object.Key) *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.values[key]
}

// all returns all values; ok is false until all objects were listed once.
func (s *store[T]) all() (values map[object.Key]*T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.values), s.synced
}
