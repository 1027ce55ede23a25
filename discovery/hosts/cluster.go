package hosts

import (
	"cmp"

	"github.com/nametap/nametap/discovery/object"
)

// A cluster holds the objects of one cluster, and the claims that they make.
type cluster struct {
	id       clusterID
	name     string // empty for the own cluster
	network  string // empty if it is not known
	domain   string
	sources  []map[object.Key]object.Object // if two have the same object, the object of the first counts
	byObject map[object.Key][]claim         // the claims, by the object that makes them

	// The objects that are needed for the claims of other objects, by the keys with which they are looked up. For example,
	// the claims of a headless Service need its EndpointSlices.

	pods      map[string]map[string]*object.Pod               // by namespace and name
	slices    map[object.Key]map[string]*object.EndpointSlice // by Service or ServiceImport, and name
	headless  map[string]map[string]*object.Service           // by namespace and name
	selecting map[string]map[string]*object.ServiceEntry      // those whose endpoints are Pods, by namespace and name
}

// newCluster returns a cluster without objects, for a number of sources.
func newCluster(name string, id clusterID, domain string, sources int) *cluster {
	cl := &cluster{
		id: id, name: name, domain: domain, byObject: map[object.Key][]claim{},
		pods: map[string]map[string]*object.Pod{}, slices: map[object.Key]map[string]*object.EndpointSlice{},
		headless: map[string]map[string]*object.Service{}, selecting: map[string]map[string]*object.ServiceEntry{},
	}
	for range sources {
		cl.sources = append(cl.sources, map[object.Key]object.Object{})
	}
	return cl
}

// get returns the object that counts for a key: the object of the first source that has one.
func (cl *cluster) get(key object.Key) (object.Object, bool) {
	for _, objects := range cl.sources {
		if o, ok := objects[key]; ok {
			return o, true
		}
	}
	return object.Object{}, false
}

// put sets the object of a source with a key; a nil o removes it. It returns the object that counted for the key before
// the call, and the object that counts after it; the zero Object stands for none.
func (cl *cluster) put(source int, key object.Key, o *object.Object) (old, current object.Object) {
	old, _ = cl.get(key)
	if o != nil {
		cl.sources[source][key] = *o
	} else {
		delete(cl.sources[source], key)
	}
	current, _ = cl.get(key)
	return old, current
}

// note notes an object for the claims of others. The parameter now is o, or the zero Object to forget o.
func (cl *cluster) note(o, now object.Object) {
	k := o.Key
	switch {
	case o.Pod != nil:
		setInner(cl.pods, k.Namespace, k.Name, now.Pod)
	case o.Slice != nil:
		for _, owner := range cl.owners(o) {
			setInner(cl.slices, owner, k.Name, now.Slice)
		}
	case o.Service != nil && o.Service.Headless:
		setInner(cl.headless, k.Namespace, k.Name, now.Service)
	case o.Entry != nil && len(o.Entry.Selector) > 0:
		setInner(cl.selecting, k.Namespace, k.Name, now.Entry)
	}
}

// owners returns the keys of the objects whose claims depend on an object.
func (cl *cluster) owners(o object.Object) (all []object.Key) {
	add := func(kind, name string) {
		all = append(all, object.Key{Kind: kind, Namespace: o.Key.Namespace, Name: name})
	}
	switch {
	case o.Slice != nil:
		if o.Slice.Service != "" {
			add(object.KindService, o.Slice.Service)
		}
		if o.Slice.Import != "" {
			add(object.KindServiceImport, o.Slice.Import)
		}
	case o.Pod != nil:
		for name := range cl.headless[o.Key.Namespace] {
			add(object.KindService, name)
		}
		for name := range cl.selecting[o.Key.Namespace] {
			add(object.KindServiceEntry, name)
		}
	case o.Service != nil || o.Entry != nil || o.Import != nil:
		all = []object.Key{o.Key}
	}
	return all
}

// setNetwork sets the network if the changed object is the root namespace, and reports whether it is the root
// namespace.
func (cl *cluster) setNetwork(old, current object.Object) bool {
	if old.Namespace == nil && current.Namespace == nil {
		return false
	}
	cl.network = ""
	if current.Namespace != nil {
		cl.network = current.Namespace.Network
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
