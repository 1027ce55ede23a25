package kube

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
)

// objects has the objects of one resource.
type objects = store[object.Object]

// newObjects returns the empty store of a resource. The parameter n selects namespaces; nil selects all.
func newObjects(r resource, n *selection, cfg source.ObjectsConfig) *objects {
	all := newStore(r, cfg.Logger, cfg.Changed, func(data []byte) reading[object.Object] { return readObject(r.kind, data) })
	all.selection = n
	return all
}

// readObject reads an object of a kind that package decode decodes.
func readObject(kind string, data []byte) reading[object.Object] {
	o, meta, errs := decode.Decode(kind, data)
	// These fields are only used with Pods, and only directories have Pods.
	switch {
	case o.Service != nil:
		o.Service.Selector = nil
	case o.Entry != nil:
		o.Entry.Selector = nil
	case o.Slice != nil:
		for i := range o.Slice.Endpoints {
			o.Slice.Endpoints[i].Pod = ""
		}
	case o == object.Object{Key: o.Key}:
		return reading[object.Object]{meta, nil, errs}
	}
	return reading[object.Object]{meta, &o, errs}
}

// metadataOnly returns a function that reads objects of which only the metadata is used.
func metadataOnly[T any](part func(decode.Meta) T) func([]byte) reading[T] {
	return func(data []byte) reading[T] {
		var from struct {
			Metadata decode.Meta `json:"metadata"`
		}
		if err := json.Unmarshal(data, &from); err != nil {
			return reading[T]{from.Metadata, nil, []object.Error{decode.Mismatch(err, "")}}
		}
		value := part(from.Metadata)
		return reading[T]{meta: from.Metadata, value: &value}
	}
}

// Source follows the objects of an API server. Make one with [Access.NewObjects].
type Source struct {
	cfg       source.ObjectsConfig
	selection *selection
	built     []*objects
	customs   []custom
	revised   atomic.Int64 // counts the changes of errors in objects

	// The fields below are owned by the goroutine that calls Read.
	errs      []object.Error // the errors in objects, as they were last collected
	collected int64          // revised when errs was collected
}

// NewObjects returns the objects of the API server.
func (a *Access) NewObjects(cfg source.ObjectsConfig) *Source {
	if cfg.Cluster != "" {
		cfg.Logger = cfg.Logger.With("cluster", cfg.Cluster)
	}
	s := &Source{cfg: cfg}
	namespaces := resource{name: "labels of namespaces", kind: object.KindNamespace, path: pathNamespaces}
	s.selection = newSelection(namespaces, s.reselect, cfg.Logger)
	for _, r := range []resource{
		{name: "services", kind: object.KindService, path: pathServices},
		{name: "endpointslices of headless Services", kind: object.KindEndpointSlice, path: pathSlices, labels: headlessSlices},
		{name: "endpointslices of other controllers", kind: object.KindEndpointSlice, path: pathSlices, labels: foreignSlices},
	} {
		s.built = append(s.built, newObjects(r, s.selection, cfg))
	}
	switch {
	case cfg.Cluster != "":
	case cfg.RootNamespace == "":
		s.Select(nil)
	default:
		s.addMesh()
	}
	if cfg.Cluster == "" {
		s.addNamespace(resource{name: "namespace " + metav1.NamespaceSystem, kind: object.KindCluster, fields: selectName(metav1.NamespaceSystem)})
	}
	if cfg.NetworkOf != "" {
		s.addNamespace(resource{name: "labels of the root namespace", kind: object.KindNamespace, fields: selectName(cfg.NetworkOf)})
	}
	customs := [][3]string{{"multicluster.x-k8s.io", "serviceimports", object.KindServiceImport}}
	if cfg.Cluster == "" {
		customs = append(customs, [3]string{"networking.istio.io", "serviceentries", object.KindServiceEntry}, [3]string{"networking.istio.io", "sidecars", object.KindSidecar})
	}
	for _, one := range customs {
		s.customs = append(s.customs, custom{newObjects(resource{name: one[1], kind: one[2]}, s.selection, cfg), one[0]})
	}
	for _, one := range s.all() {
		one.dirty, one.revised = map[object.Key]bool{}, &s.revised
	}
	s.Use(a)
	return s
}

// Use makes the next Run read from another API server, or as another user. Until all objects of a resource were read there,
// the earlier ones stay. It must not be called while Run runs.
func (s *Source) Use(a *Access) {
	s.selection.namespaces.client = a.client
	for _, one := range s.all() {
		one.resource.client = a.client
	}
}

// addNamespace adds a namespace as an object of the kind of r. The UID of kube-system identifies the cluster. A label of
// the root namespace names the network.
func (s *Source) addNamespace(r resource) {
	r.path = pathNamespaces
	s.built = append(s.built, newStore(r, s.cfg.Logger, s.cfg.Changed, metadataOnly(func(m decode.Meta) object.Object {
		o := object.Object{Key: object.Key{Kind: r.kind, Name: m.Name}}
		if r.kind == object.KindCluster {
			o.Cluster = &object.Cluster{UID: m.UID}
		} else {
			o.Namespace = &object.Namespace{Network: m.Labels[object.LabelNetwork]}
		}
		return o
	})))
}

// addMesh adds the ConfigMap with the settings of the mesh. Its discovery selectors say which namespaces count. If the
// ConfigMap is broken from the start, no table is served, because the settings may hide any host.
func (s *Source) addMesh() {
	var mesh *objects
	r := resource{
		name: "settings of the mesh", kind: object.KindConfigMap,
		path: "/api/v1/namespaces/" + s.cfg.RootNamespace + "/configmaps", fields: selectName(meshName),
	}
	mesh = newStore(r, s.cfg.Logger, func() {
		if all, ok := mesh.all(); ok {
			var selectors []string
			for _, o := range all {
				selectors = o.Mesh.Selectors
			}
			s.Select(selectors)
			if s.cfg.Selected != nil {
				s.cfg.Selected(selectors)
			}
		}
		s.cfg.Changed()
	}, readMesh)
	mesh.strict = true
	s.built = append(s.built, mesh)
}

// Select sets the discovery selectors, in the form of kubectl's --selector. Before the first call, a Source of another
// cluster does not know which namespaces count, so it reads no objects in namespaces.
func (s *Source) Select(selectors []string) {
	n := s.selection
	n.mu.Lock()
	n.wanted, n.known = selectors, true
	n.mu.Unlock()
	chans.Wake(n.woken)
}

// Run follows the objects until ctx ends. All its goroutines have ended when it returns. It may be called again then.
func (s *Source) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { s.selection.run(ctx) })
	for _, b := range s.built {
		group.Go(func() { b.run(ctx) })
	}
	for _, c := range s.customs {
		group.Go(func() { c.run(ctx) })
	}
	group.Wait()
}

// Name returns the name of the source.
func (s *Source) Name() string { return "the Kubernetes API" }

// Read returns what has changed since the last call; nothing has until all objects were read. It must not be called by two
// goroutines at a time. The caller must not change the objects.
func (s *Source) Read() source.Reading {
	stores, dirty := s.all(), map[object.Key]bool{}
	r := source.Reading{Waiting: s.Waiting(), Errors: s.errors(stores)}
	if r.Read = r.Waiting == ""; !r.Read {
		return r
	}
	for _, one := range stores {
		one.take(dirty)
	}
	change := hosts.Change{Cluster: s.cfg.Cluster}
	for _, key := range slices.SortedFunc(maps.Keys(dirty), object.Key.Compare) {
		if o := find(stores, key); o != nil {
			change.Updated = append(change.Updated, *o)
		} else {
			change.Removed = append(change.Removed, key)
		}
	}
	if len(dirty) > 0 {
		r.Changes = []hosts.Change{change}
	}
	return r
}

// errors returns the errors in objects, sorted. The owner of a namespace can make many, so they are collected only when
// they have changed; otherwise errors returns the same slice again.
func (s *Source) errors(stores []*objects) []object.Error {
	revised := s.revised.Load()
	if revised == s.collected {
		return s.errs
	}
	s.errs, s.collected = nil, revised
	for _, one := range stores {
		s.errs = one.addErrors(s.errs)
	}
	for i := range s.errs {
		s.errs[i].Cluster = s.cfg.Cluster
	}
	slices.SortStableFunc(s.errs, func(a, b object.Error) int { return a.Object.Compare(b.Object) })
	return s.errs
}

// all returns the stores of all resources.
func (s *Source) all() []*objects {
	all := slices.Clone(s.built)
	for _, c := range s.customs {
		all = append(all, c.objects)
	}
	return all
}

// reselect is called when other namespaces count than before. Then the stores drop the objects of namespaces that do
// not count any more, and read the objects of those that count now.
func (s *Source) reselect() {
	for _, one := range s.all() {
		if one.selection != nil {
			one.reselect()
		}
	}
}

// Waiting says which resources were never read, and why; it returns "" if all were read.
func (s *Source) Waiting() string {
	var waiting []string
	for _, state := range s.Status() {
		if why := state.Waiting(); why != "" {
			waiting = append(waiting, why)
		}
	}
	return strings.Join(waiting, "; ")
}

// Status returns the state of each resource.
func (s *Source) Status() []source.Status {
	var all []source.Status
	for _, one := range s.all() {
		all = append(all, one.status())
	}
	all = append(all, s.selection.status()...)
	for i := range all {
		all[i].Cluster = s.cfg.Cluster
	}
	return all
}

// find returns the object with a key; nil if there is none. It looks in all stores, because an EndpointSlice moves to
// another one when its labels change.
func find(stores []*objects, key object.Key) *object.Object {
	for _, one := range stores {
		if o := one.get(key); o != nil {
			return o
		}
	}
	return nil
}
