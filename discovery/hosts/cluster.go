package hosts

import (
	"cmp"

	"github.com/nametap/nametap/discovery/object"
)

// A cluster holds the objects of one cluster, and the claims that they make.
type cluster struct {
	index
	name     string                         // empty for the own cluster
	network  string                         // empty if it is not known
	sources  []map[object.Key]object.Object // if two have the same object, the object of the first counts
	byObject map[object.Key][]claim         // the claims, by the object that makes them
}

// newCluster returns a cluster without objects, for a number of sources.
func newCluster(name string, id clusterID, domain string, sources int) *cluster {
	c := &cluster{index: *newIndex(domain, id), name: name, byObject: map[object.Key][]claim{}}
	for range sources {
		c.sources = append(c.sources, map[object.Key]object.Object{})
	}
	return c
}

// get returns the object that counts for a key: the object of the first source that has one.
func (c *cluster) get(key object.Key) (object.Object, bool) {
	for _, objects := range c.sources {
		if o, ok := objects[key]; ok {
			return o, true
		}
	}
	return object.Object{}, false
}

// put sets the object of a source with a key; a nil o removes it. It returns the object that counted for the key before
// the call, and the object that counts after it; the zero Object stands for none.
func (c *cluster) put(source int, key object.Key, o *object.Object) (old, current object.Object) {
	old, _ = c.get(key)
	if o != nil {
		c.sources[source][key] = *o
	} else {
		delete(c.sources[source], key)
	}
	current, _ = c.get(key)
	return old, current
}

// setNetwork sets the network if the changed object is the root namespace, and reports whether it is the root
// namespace.
func (c *cluster) setNetwork(old, current object.Object) bool {
	if old.Namespace == nil && current.Namespace == nil {
		return false
	}
	c.network = ""
	if current.Namespace != nil {
		c.network = current.Namespace.Network
	}
	return true
}

// objectID identifies an object in all clusters.
type objectID struct {
	cluster clusterID
	key     object.Key
}

func (id objectID) compare(other objectID) int {
	return cmp.Or(id.key.Compare(other.key), cmp.Compare(id.cluster, other.cluster))
}
