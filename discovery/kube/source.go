package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// Source follows the objects of an API server. Make one with [Access.NewObjects].
type Source struct {
	cfg       source.ObjectsConfig
	clients   *clients
	selection *selection
	feeds     []*resource
	customs   []custom

	// The fields below are owned by the goroutine that calls Read.
	errs    []object.Error // the errors in objects, as they were last collected
	revised []int          // for each feed, how often its errors had changed when errs was collected
}

// NewObjects returns the objects of the API server.
func (a *Access) NewObjects(cfg source.ObjectsConfig) (*Source, error) {
	if cfg.Cluster != "" {
		cfg.Logger = cfg.Logger.With("cluster", cfg.Cluster)
	}
	c, err := newClients(a.config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API (--kubeconfig): %w", err)
	}
	s := &Source{cfg: cfg, clients: c}
	s.selection = newSelection(namespaceLister(c.metadata), s.reselect, cfg.Logger)
	s.feeds = []*resource{
		{newFeed("services", s.selection, cfg), typedLister(c.core, "services", "", &corev1.Service{})},
		{newFeed("endpointslices of headless Services", s.selection, cfg), typedLister(c.discovery, "endpointslices", headlessSlices, &discoveryv1.EndpointSlice{})},
		{newFeed("endpointslices of other controllers", s.selection, cfg), typedLister(c.discovery, "endpointslices", foreignSlices, &discoveryv1.EndpointSlice{})},
	}
	switch {
	case cfg.Cluster != "":
	case cfg.RootNamespace == "":
		s.Select(nil)
	default:
		s.feeds = append(s.feeds, s.meshResource())
	}
	if cfg.Cluster == "" {
		name := cache.NewObjectName("", metav1.NamespaceSystem)
		s.feeds = append(s.feeds, &resource{newFeed("namespace "+name.Name, nil, cfg), namedLister(c.core, "namespaces", name, &corev1.Namespace{})})
	}
	if cfg.NetworkOf != "" {
		s.feeds = append(s.feeds, &resource{newFeed("labels of the root namespace", nil, cfg), c.networkLister(cfg.NetworkOf)})
	}
	s.customs = newCustoms(c, s.selection, cfg)
	return s, nil
}

// meshResource returns the ConfigMap with the settings of the mesh. Its discovery selectors say which namespaces count.
// If the ConfigMap is broken from the start, no table is served, because the settings may hide any host.
func (s *Source) meshResource() *resource {
	f := newFeed("settings of the mesh", nil, s.cfg)
	f.strict = true
	f.notify = func() {
		if selectors, ok := f.selectors(); ok {
			s.Select(selectors)
			if s.cfg.Selected != nil {
				s.cfg.Selected(selectors)
			}
		}
		s.cfg.Changed()
	}
	name := cache.NewObjectName(s.cfg.RootNamespace, meshName)
	return &resource{f, namedLister(s.clients.core, "configmaps", name, &corev1.ConfigMap{})}
}

// Select sets the discovery selectors, in the form of kubectl's --selector. Before the first call, a Source of another
// cluster does not know which namespaces count, so it reads no objects in namespaces.
func (s *Source) Select(selectors []string) { s.selection.setSelectors(selectors) }

// Run follows the objects until ctx ends. All its goroutines have ended when it returns.
func (s *Source) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { s.selection.run(ctx) })
	for _, r := range s.feeds {
		group.Go(func() { r.run(ctx, r.lister) })
	}
	for _, c := range s.customs {
		group.Go(func() { c.run(ctx) })
	}
	group.Wait()
}

// Name returns the name of the source.
func (s *Source) Name() string { return "the Kubernetes API" }

// Read returns what has changed since the last call. It must not be called by two goroutines at a
// time. The caller must not change the objects.
func (s *Source) Read() source.Reading {
	r := source.Reading{Waiting: s.Waiting()}
	r.Read = r.Waiting == ""
	feeds, dirty := s.all(), map[object.Key]bool{}
	for _, f := range feeds {
		f.take(dirty)
	}
	r.Errors = s.errors(feeds)
	change := hosts.Change{Cluster: s.cfg.Cluster}
	for _, key := range slices.SortedFunc(maps.Keys(dirty), object.Key.Compare) {
		if o, ok := find(feeds, key); ok {
			change.Updated = append(change.Updated, o)
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
func (s *Source) errors(feeds []*feed) []object.Error {
	revised := make([]int, len(feeds))
	for i, f := range feeds {
		revised[i] = f.errorsRevised()
	}
	if slices.Equal(revised, s.revised) {
		return s.errs
	}
	s.errs, s.revised = nil, revised
	for i, f := range feeds {
		s.errs, revised[i] = f.addErrors(s.errs)
	}
	for i := range s.errs {
		s.errs[i].Cluster = s.cfg.Cluster
	}
	slices.SortStableFunc(s.errs, func(a, b object.Error) int { return a.Object.Compare(b.Object) })
	return s.errs
}

// all returns all feeds.
func (s *Source) all() []*feed {
	var all []*feed
	for _, r := range s.feeds {
		all = append(all, r.feed)
	}
	for _, c := range s.customs {
		all = append(all, c.feed)
	}
	return all
}

// reselect is called when other namespaces count than before. Then the feeds drop the objects of namespaces that do
// not count any more, and read the objects of those that count now.
func (s *Source) reselect() {
	for _, f := range s.all() {
		if f.selection != nil {
			f.reselect()
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

// All returns all objects, sorted by key. The caller must not change them.
func (s *Source) All() []object.Object {
	all := map[object.Key]object.Object{}
	for _, f := range slices.Backward(s.all()) {
		f.copyTo(all)
	}
	return slices.SortedFunc(maps.Values(all), func(a, b object.Object) int { return a.Key.Compare(b.Key) })
}

// Status returns the state of each resource.
func (s *Source) Status() []source.Status {
	var all []source.Status
	for _, f := range s.feeds {
		all = append(all, f.status())
	}
	for _, c := range s.customs {
		all = append(all, c.status())
	}
	all = append(all, s.selection.status()...)
	for i := range all {
		all[i].Cluster = s.cfg.Cluster
	}
	return all
}

// A resource is a built-in resource and its feed.
type resource struct {
	*feed
	lister lister
}

// find returns the object with a key. It looks in all feeds, because an EndpointSlice moves to another feed when its
// labels change.
func find(feeds []*feed, key object.Key) (object.Object, bool) {
	for _, f := range feeds {
		if o, ok := f.get(key); ok {
			return o, true
		}
	}
	return object.Object{}, false
}
