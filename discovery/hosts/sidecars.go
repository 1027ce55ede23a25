package hosts

import (
	"cmp"
	"maps"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// sidecars holds the Sidecars.
type sidecars struct {
	of      sidecarsOf
	changes map[string]*sidecarChange // by namespace, until settle
}

// A sidecarChange has the Sidecars of a namespace that have changed.
type sidecarChange struct {
	gone map[object.Key]bool
	now  map[object.Key]*sidecar
}

// A sidecar is a Sidecar with its prepared selector and egress.
type sidecar struct {
	key object.Key
	*object.Sidecar
	selector Labels // the labels of its workloads, as they are compared with the labels of clients
	egress   *object.Egress
}

// put notes that an object has changed, and reports whether it is a Sidecar.
func (s *sidecars) put(before, now object.Object) bool {
	if before.Sidecar == nil && now.Sidecar == nil {
		return false
	}
	key := cmp.Or(now.Key, before.Key)
	if s.changes == nil {
		s.changes = map[string]*sidecarChange{}
	}
	c := s.changes[key.Namespace]
	if c == nil {
		c = &sidecarChange{map[object.Key]bool{}, map[object.Key]*sidecar{}}
		s.changes[key.Namespace] = c
	}
	c.gone[key] = true
	if delete(c.now, key); now.Sidecar != nil {
		c.now[key] = &sidecar{key, now.Sidecar, NewLabels(now.Sidecar.Labels), now.Sidecar.NewEgress()}
	}
	return true
}

// settle applies the changes, all of a namespace at once: there may be many. As in istiod, Sidecars with a
// workloadSelector come before the others, and older Sidecars before younger ones. If no age is known, because the
// objects are from a directory, the name decides.
func (s *sidecars) settle() {
	for namespace, c := range s.changes {
		all := slices.DeleteFunc(slices.Clone(s.of[namespace]), func(old *sidecar) bool { return c.gone[old.key] })
		all = slices.AppendSeq(all, maps.Values(c.now))
		slices.SortFunc(all, func(a, b *sidecar) int {
			return cmp.Or(-cmp.Compare(min(len(a.Labels), 1), min(len(b.Labels), 1)), a.Created.Compare(b.Created), a.key.Compare(b.key))
		})
		if s.of[namespace] = all; len(all) == 0 {
			delete(s.of, namespace)
		}
	}
	s.changes = nil
}

// sidecarsOf are the Sidecars by namespace, in order of precedence. The slices do not change.
type sidecarsOf map[string][]*sidecar

// first returns the first Sidecar of a namespace that selects a workload with labels, if there is one.
func (s sidecarsOf) first(namespace string, labels Labels) Limit {
	for _, o := range s[namespace] {
		if labels.have(o.selector) {
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
