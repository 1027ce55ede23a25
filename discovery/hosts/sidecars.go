package hosts

import (
	"cmp"
	"maps"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// sidecars holds the Sidecars.
type sidecars struct {
	byNamespace namespaceSidecars
	changes     map[string]*sidecarChange // by namespace; settle applies them
}

// A sidecarChange has the Sidecars of a namespace that have changed.
type sidecarChange struct {
	removed map[object.Key]bool
	current map[object.Key]*sidecar
}

// A sidecar is a Sidecar with its prepared selector and egress.
type sidecar struct {
	key object.Key
	*object.Sidecar
	selector Labels // the labels of its workloads, as they are compared with the labels of clients
	egress   *object.Egress
}

// put notes that an object has changed, and reports whether it is a Sidecar.
func (s *sidecars) put(old, current object.Object) bool {
	if old.Sidecar == nil && current.Sidecar == nil {
		return false
	}
	key := cmp.Or(current.Key, old.Key)
	if s.changes == nil {
		s.changes = map[string]*sidecarChange{}
	}
	c := s.changes[key.Namespace]
	if c == nil {
		c = &sidecarChange{map[object.Key]bool{}, map[object.Key]*sidecar{}}
		s.changes[key.Namespace] = c
	}
	c.removed[key] = true
	if delete(c.current, key); current.Sidecar != nil {
		c.current[key] = &sidecar{key, current.Sidecar, NewLabels(current.Sidecar.Labels), current.Sidecar.NewEgress()}
	}
	return true
}

// settle applies the changes, all of a namespace at once: there may be many. As in istiod, Sidecars with a
// workloadSelector come before the others, and older Sidecars before younger ones. If no age is known, because the
// objects are from a directory, the name decides.
func (s *sidecars) settle() {
	for namespace, c := range s.changes {
		all := slices.DeleteFunc(slices.Clone(s.byNamespace[namespace]), func(old *sidecar) bool { return c.removed[old.key] })
		all = slices.AppendSeq(all, maps.Values(c.current))
		slices.SortFunc(all, func(a, b *sidecar) int {
			return cmp.Or(-cmp.Compare(min(len(a.Labels), 1), min(len(b.Labels), 1)), a.Created.Compare(b.Created), a.key.Compare(b.key))
		})
		if s.byNamespace[namespace] = all; len(all) == 0 {
			delete(s.byNamespace, namespace)
		}
	}
	s.changes = nil
}

// namespaceSidecars are the Sidecars by namespace, in order of precedence. The slices do not change.
type namespaceSidecars map[string][]*sidecar

// find returns the first Sidecar of a namespace that selects a workload with labels, or the zero Limit.
func (s namespaceSidecars) find(namespace string, labels Labels) Limit {
	for _, o := range s[namespace] {
		if labels.match(o.selector) {
			return Limit{o.key, o}
		}
	}
	return Limit{}
}

// A Limit is a Sidecar that limits the hosts of a client. The zero value stands for no Sidecar.
type Limit struct {
	Key     object.Key
	sidecar *sidecar // nil for no Sidecar
}
