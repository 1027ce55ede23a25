package discovery

import (
	"cmp"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// rootNamespace is the namespace whose Sidecar without a workloadSelector is the default of all
// namespaces.
const rootNamespace = "istio-system"

// sidecars holds the Sidecars by namespace, in the order in which they are considered.
type sidecars map[string][]object.Object

// collectSidecars returns the Sidecars among objects. As in istiod, those with a workloadSelector
// come first, and then older ones. In a directory they have no age, so the name decides.
func collectSidecars(objects []object.Object) sidecars {
	all := sidecars{}
	for _, o := range objects {
		if o.Sidecar != nil {
			all[o.Key.Namespace] = append(all[o.Key.Namespace], o)
		}
	}
	for _, inNamespace := range all {
		slices.SortFunc(inNamespace, func(a, b object.Object) int {
			return cmp.Or(-cmp.Compare(min(len(a.Sidecar.Labels), 1), min(len(b.Sidecar.Labels), 1)),
				a.Sidecar.Created.Compare(b.Sidecar.Created), a.Key.Compare(b.Key))
		})
	}
	return all
}

// of returns the key of the Sidecar of a workload, and the zero key if it has none.
func (s sidecars) of(namespace string, labels map[string]string) object.Key {
	for _, o := range s[namespace] {
		if object.Selects(o.Sidecar.Labels, labels) {
			return o.Key
		}
	}
	for _, o := range s[rootNamespace] {
		if len(o.Sidecar.Labels) == 0 {
			return o.Key
		}
	}
	return object.Key{}
}

// get returns the Sidecar with a key that of has returned, and nil for the zero key.
func (s sidecars) get(key object.Key) *object.Sidecar {
	for _, o := range s[key.Namespace] {
		if o.Key == key {
			return o.Sidecar
		}
	}
	return nil
}
