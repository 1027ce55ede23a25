package kube

import (
	"fmt"
	"log/slog"
	"maps"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/source"
)

// A mirror holds a part of each object of a resource, by namespace and name. It is the store of a
// Reflector.
type mirror[T any] struct {
	part    func(metav1.Object) T
	changed func() // called after each change, without the lock; must not block

	health

	mu     sync.Mutex
	parts  map[cache.ObjectName]T
	synced bool // all objects were listed once
}

var _ cache.ReflectorStore = (*mirror[bool])(nil)

// newMirror returns an empty mirror of the resource with a name. The function part returns the part of an object that
// the mirror holds.
func newMirror[T any](name string, log *slog.Logger, changed func(), part func(metav1.Object) T) *mirror[T] {
	return &mirror[T]{health: health{resource: name, log: log}, changed: changed, part: part, parts: map[cache.ObjectName]T{}}
}

// objectOf returns the metadata of an object from client-go, and its name.
func objectOf(whole any) (metav1.Object, cache.ObjectName, error) {
	o, err := meta.Accessor(whole)
	if err != nil {
		return nil, cache.ObjectName{}, fmt.Errorf("unexpected object of type %T: %w", whole, err)
	}
	return o, cache.MetaObjectToName(o), nil
}

// update calls the function change, which changes the parts, and then the function m.changed.
func (m *mirror[T]) update(change func()) {
	m.mu.Lock()
	change()
	m.mu.Unlock()
	m.changed()
}

// Add takes an object that is new or has changed.
func (m *mirror[T]) Add(whole any) error {
	o, name, err := objectOf(whole)
	if err != nil {
		return err
	}
	m.update(func() { m.parts[name] = m.part(o) })
	return nil
}

// Update does the same as Add.
func (m *mirror[T]) Update(whole any) error { return m.Add(whole) }

// Delete removes an object.
func (m *mirror[T]) Delete(whole any) error {
	_, name, err := objectOf(whole)
	if err != nil {
		return err
	}
	m.update(func() { delete(m.parts, name) })
	return nil
}

// Replace replaces all objects of the mirror by the objects in list.
func (m *mirror[T]) Replace(list []any, _ string) error {
	parts := make(map[cache.ObjectName]T, len(list))
	for _, whole := range list {
		o, name, err := objectOf(whole)
		if err != nil {
			return err
		}
		parts[name] = m.part(o)
	}
	m.update(func() { m.parts, m.synced = parts, true })
	return nil
}

// Resync does nothing: the mirror is always in step.
func (m *mirror[T]) Resync() error { return nil }

// all returns a copy of the parts; ok is false until all objects were listed once.
func (m *mirror[T]) all() (parts map[cache.ObjectName]T, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.parts), m.synced
}

// status returns the state of the resource.
func (m *mirror[T]) status() source.Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.health.status(len(m.parts), m.synced)
}
