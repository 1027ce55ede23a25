package hosts

import (
	"cmp"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// sidecars holds the Sidecars by namespace, in order of precedence. The slices do not change.
type sidecars map[string][]*sidecar

// A sidecar is a Sidecar with its prepared selector and egress.
type sidecar struct {
	key object.Key
	*object.Sidecar
	selector Labels // the labels of its workloads, as they are compared with the labels of clients
	egress   *object.Egress
}

// put applies an object that has changed, and reports whether it is a Sidecar.
func (s sidecars) put(old, current object.Object) bool {
	if old.Sidecar != nil {
		s.remove(old)
	}
	if current.Sidecar != nil {
		s.add(current)
	}
	return old.Sidecar != nil || current.Sidecar != nil
}

// add adds a Sidecar. As in istiod, Sidecars with a workloadSelector come before the others, and
// older Sidecars before younger ones. If no age is known, because the objects are from a directory,
// the name decides.
func (s sidecars) add(o object.Object) {
	added, all := &sidecar{o.Key, o.Sidecar, NewLabels(o.Sidecar.Labels), o.Sidecar.NewEgress()}, s[o.Key.Namespace]
	i, _ := slices.BinarySearchFunc(all, added, func(a, b *sidecar) int {
		return cmp.Or(-cmp.Compare(min(len(a.Labels), 1), min(len(b.Labels), 1)), a.Created.Compare(b.Created), a.key.Compare(b.key))
	})
	s[o.Key.Namespace] = slices.Insert(slices.Clip(all), i, added)
}

// remove removes a Sidecar.
func (s sidecars) remove(o object.Object) {
	rest := slices.DeleteFunc(slices.Clone(s[o.Key.Namespace]), func(other *sidecar) bool { return other.key == o.Key })
	if s[o.Key.Namespace] = rest; len(rest) == 0 {
		delete(s, o.Key.Namespace)
	}
}

// find returns the first Sidecar of a namespace that selects a workload with labels; the zero Limit if there is none.
func (s sidecars) find(namespace string, labels Labels) Limit {
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
