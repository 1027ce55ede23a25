package hosts

import "github.com/nametap/nametap/discovery/object"

// A Change has the objects of a source that have changed. A source is, for example, the API server of a cluster, or a
// directory.
type Change struct {
	// Cluster is the name of the objects' cluster; empty for the control plane's own cluster. The
	// first change of a cluster adds it.
	Cluster string
	// Source is the number of the source, from 0. If two sources have the same object, the object of the source with
	// the lower number counts. Clusters other than the own one have only the source 0.
	Source  int
	Updated []object.Object // new, or with another content
	Removed []object.Key
	// Dropped is true if the cluster is removed with all its objects. The own cluster is never removed.
	Dropped bool
}
