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
	// Whole is true if Updated has all objects of the source. All other objects of the source are removed.
	Whole bool
	// Dropped is true if the cluster is removed with all its objects. The own cluster is never removed.
	Dropped bool
}

// A sourceID identifies a source in all clusters.
type sourceID struct {
	cluster string
	number  int
}

// Merge merges a list of changes into one change for each source, with the same effect.
func Merge(changes []Change) []Change {
	var order []sourceID
	merged := map[sourceID]*Change{}
	objects := map[sourceID]map[object.Key]*object.Object{} // nil for a removed object
	for _, c := range changes {
		id := sourceID{c.Cluster, c.Source}
		m := merged[id]
		if m == nil {
			m = &Change{Cluster: c.Cluster, Source: c.Source}
			merged[id] = m
			order = append(order, id)
		}
		if c.Whole || c.Dropped || m.Dropped || objects[id] == nil {
			m.Whole = m.Whole || c.Whole || m.Dropped
			m.Dropped = c.Dropped
			objects[id] = map[object.Key]*object.Object{}
		}
		for i := range c.Updated {
			objects[id][c.Updated[i].Key] = &c.Updated[i]
		}
		for _, key := range c.Removed {
			objects[id][key] = nil
		}
	}
	all := make([]Change, 0, len(order))
	for _, id := range order {
		c := merged[id]
		for key, o := range objects[id] {
			switch {
			case o != nil:
				c.Updated = append(c.Updated, *o)
			case !c.Whole:
				c.Removed = append(c.Removed, key)
			}
		}
		all = append(all, *c)
	}
	return all
}
