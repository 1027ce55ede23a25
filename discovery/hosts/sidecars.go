package hosts

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// sidecars holds the Sidecars.
type sidecars struct {
	all         map[string]map[object.Key]*sidecar // by namespace
	byNamespace namespaceSidecars                  // the same in order, after settle
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
	setInner(s.all, old.Key.Namespace, old.Key, nil)
	if key := current.Key; current.Sidecar != nil {
		setInner(s.all, key.Namespace, key, &sidecar{key, current.Sidecar, NewLabels(current.Sidecar.Labels), current.Sidecar.NewEgress()})
	}
	return true
}

// settle orders the Sidecars of namespaces that have changed, all at once: there may be many. As in istiod, Sidecars with a
// workloadSelector come before the others, and older Sidecars before younger ones. If no age is known, because the
// objects are from a directory, the name decides.
func (s *sidecars) settle(changed map[string]bool) {
	for namespace := range changed {
		delete(s.byNamespace, namespace)
		if len(s.all[namespace]) > 0 {
			s.byNamespace[namespace] = slices.SortedFunc(maps.Values(s.all[namespace]), func(a, b *sidecar) int {
				return cmp.Or(-cmp.Compare(min(len(a.Labels), 1), min(len(b.Labels), 1)), a.Created.Compare(b.Created), a.key.Compare(b.key))
			})
		}
	}
}

// namespaceSidecars are the Sidecars by namespace, in order of precedence. The slices do not change.
type namespaceSidecars map[string][]*sidecar

// find returns the first Sidecar of a namespace that selects a workload with labels, or the zero Limit.
func (s namespaceSidecars) find(namespace string, labels Labels) Limit {
	for _, o := range s[namespace] {
		if !slices.ContainsFunc(o.selector, func(label uint64) bool { return !slices.Contains(labels, label) }) {
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

// Labels are the labels of a workload, each as a hash of 64 bits. A client may have many labels, and a Sidecar may
// select any of them later, so all are kept as long as the client's stream lives: in 8 bytes each, whatever their
// length. Two labels with the same hash are no danger: a client could as well claim to have both.
type Labels []uint64

// NewLabels returns the labels with names and values.
func NewLabels(labels map[string]string) Labels {
	l := make(Labels, 0, len(labels))
	for name, value := range labels {
		hash := fnv.New64a()
		_, _ = hash.Write([]byte(name + "\x00" + value)) // no name contains a zero byte
		l = append(l, hash.Sum64())
	}
	return l
}
