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
func (s sidecars) put(before, now object.Object) bool {
	if before.Sidecar != nil {
		s.remove(before)
	}
	if now.Sidecar != nil {
		s.add(now)
	}
	return before.Sidecar != nil || now.Sidecar != nil
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

// of returns the first Sidecar of a namespace that selects a workload with labels, if there is one.
func (s sidecars) of(namespace string, labels Labels) Limit {
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
