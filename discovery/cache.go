package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// typeURL is the type of the served resources.
const typeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// cache serves the views of the hosts to go-control-plane's server, which
// handles the streams. go-control-plane's LinearCache is not usable: in state-of-the-world
// it sends only the resources that changed, unless they are clusters or listeners, but a
// NameTable response must be complete.
//
// A watch waits for one response. The server opens the next watch when the client has
// answered, so a client never has two pushes in flight and always gets the latest state.
type cache struct {
	mu        sync.Mutex
	hosts     *hosts.Hosts
	waiting   string            // why no table is served yet; empty if tables are
	missing   map[string]string // why the objects of a cluster are missing, by name
	views     map[viewKey]*view
	resources map[resourceID]*resource // encoded tables that a view has
	uses      uint64                   // of views, counted
}

// maxIdleViews bounds the views without watches: a client chooses its view.
const maxIdleViews = 64

// resourceID identifies the content of a table. Views with the same content share the bytes.
type resourceID struct{ name, version string }

// watch is a request that waits. answer sends what the view holds that is new for the
// client, and reports whether there was anything.
type watch struct {
	client subscriber
	answer answer
	view   *view // that it waits for
}

type answer func(*view) (bool, error)

func newCache(all *hosts.Hosts) *cache {
	return &cache{hosts: all, waiting: "no object has been read yet", views: map[viewKey]*view{}, resources: map[resourceID]*resource{}}
}

// waitingFor sets the reason that is sent to clients while there is no table; an empty string
// says that there is one.
func (c *cache) waitingFor(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = why
}

// setMissing sets which clusters have no objects, and why. Their clients are sent no table, because
// they would lose the hosts of their own cluster.
func (c *cache) setMissing(clusters map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missing = clusters
}

// update puts changes of the objects to use, and answers the watches for which something has
// changed. Before that it calls note with the result, so that no client has a VIP that is not saved, or a
// table whose errors are not reported.
func (c *cache) update(changes []hosts.Change, note func(hosts.Update, hosts.Counts)) (hosts.Update, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.hosts.Update(changes...)
	note(u, c.hosts.Counts())
	if u.Views {
		c.remakeViewsLocked()
	} else {
		replaced := map[resourceID]bool{}
		for _, v := range c.views {
			for _, id := range v.update(u.Hosts) {
				replaced[id] = true
			}
		}
		c.dropUnusedLocked(replaced)
	}
	var failures []error
	for _, v := range c.views {
		for w := range v.watches {
			answered, err := w.answer(v)
			if answered || err != nil {
				delete(v.watches, w)
			}
			failures = append(failures, err)
		}
	}
	return u, errors.Join(failures...)
}

// diff returns the change that makes objects all those of a source.
func (c *cache) diff(source int, objects []object.Object) hosts.Change {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hosts.Diff(source, objects)
}

// statuses returns the ServiceEntries of a source whose status must change.
func (c *cache) statuses(source int) map[object.Key]object.VIPStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hosts.Statuses(source)
}

// remakeViewsLocked makes all views anew after a change that may give a client another view. It drops
// views without watches; a client that is about to answer a push creates its view again.
func (c *cache) remakeViewsLocked() {
	views := map[viewKey]*view{}
	for _, old := range c.views {
		for w := range old.watches {
			key := c.keyLocked(w.client)
			if views[key] == nil {
				views[key] = newView(c.hosts, key)
			}
			w.view = views[key]
			w.view.watches[w] = struct{}{}
		}
	}
	c.views = views
	all := map[resourceID]bool{}
	for id := range c.resources {
		all[id] = true
	}
	c.dropUnusedLocked(all)
}

// keyLocked returns the key of the view of a client.
func (c *cache) keyLocked(client subscriber) viewKey {
	key := client.view
	key.Sidecar = c.hosts.Sidecar(key.Namespace, client.labels)
	key.Place = c.hosts.Place(client.cluster, client.network)
	return key
}

// dropUnusedLocked drops those of the encoded tables that no view has.
func (c *cache) dropUnusedLocked(some map[resourceID]bool) {
	for id := range some {
		used := false
		for _, v := range c.views {
			used = used || v.has(id)
		}
		if !used {
			delete(c.resources, id)
		}
	}
}

// dropViewLocked drops a view, and the encoded tables that no other one has.
func (c *cache) dropViewLocked(key viewKey) {
	v := c.views[key]
	delete(c.views, key)
	tables := map[resourceID]bool{}
	for name, t := range v.tables {
		tables[resourceID{name, t.version}] = true
	}
	c.dropUnusedLocked(tables)
}

// encodedLocked returns the encoded tables of a view with the given names, in their order.
func (c *cache) encodedLocked(v *view, names []string) []*resource {
	missing := map[string]bool{}
	for _, name := range names {
		if c.resources[resourceID{name, v.tables[name].version}] == nil {
			missing[name] = true
		}
	}
	if len(missing) > 0 {
		for name, r := range v.encode(c.hosts, missing) {
			c.resources[resourceID{name, r.version}] = r
		}
	}
	all := make([]*resource, len(names))
	for i, name := range names {
		all[i] = c.resources[resourceID{name, v.tables[name].version}]
	}
	return all
}

// wholeLocked returns the form of the resource in a state-of-the-world response. Such a
// response has no field for names, so a resource with a name is sent in xDS's wrapper.
func (r *resource) wholeLocked() (*anypb.Any, error) {
	if r.name == "" {
		return r.body, nil
	}
	if r.wrapped == nil {
		var err error
		if r.wrapped, err = anypb.New(r.named()); err != nil {
			return nil, fmt.Errorf("wrapping table %q: %w", r.name, err)
		}
	}
	return r.wrapped, nil
}

// CreateWatch serves a state-of-the-world request.
func (c *cache) CreateWatch(req *cachev3.Request, sub cachev3.Subscription, out chan cachev3.Response) (func(), error) {
	// The version in the request is ignored: after a NACK it is the previous one, and the
	// server would send the rejected push again, forever.
	first := req.GetResponseNonce() == ""
	return c.watch(req.GetTypeUrl(), req.GetNode(), func(v *view) (bool, error) {
		names, versions := v.selected(sub)
		if version, unnamed := versions[""]; unnamed {
			// On every request the server forgets the resources that were sent under
			// names that the client has not requested. If the table were remembered only
			// under the name "", each ACK would cause another push.
			for name := range sub.SubscribedResources() {
				versions[name] = version
			}
			if !sub.IsWildcard() {
				delete(versions, "")
			}
		}
		if !first && maps.Equal(versions, sub.ReturnedResources()) {
			return false, nil
		}
		resp := &discoveryv3.DiscoveryResponse{TypeUrl: typeURL, VersionInfo: v.version()}
		for _, r := range c.encodedLocked(v, names) {
			body, err := r.wholeLocked()
			if err != nil {
				return false, err
			}
			resp.Resources = append(resp.Resources, body)
		}
		out <- &cachev3.PassthroughResponse{Request: req, DiscoveryResponse: resp, ReturnedResources: versions}
		return true, nil
	})
}

// CreateDeltaWatch serves an incremental request.
func (c *cache) CreateDeltaWatch(
	req *cachev3.DeltaRequest, sub cachev3.Subscription, out chan cachev3.DeltaResponse,
) (func(), error) {
	// The first request is answered even if nothing is new, because the client waits for
	// an answer.
	first := req.GetResponseNonce() == "" && len(sub.ReturnedResources()) == 0
	resuming := req.GetResponseNonce() == "" && len(req.GetInitialResourceVersions()) > 0
	return c.watch(req.GetTypeUrl(), req.GetNode(), func(v *view) (bool, error) {
		names, versions := v.selected(sub)
		known := sub.ReturnedResources()
		resp := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: typeURL, SystemVersionInfo: v.version()}
		names = slices.DeleteFunc(names, func(name string) bool { return known[name] == versions[name] })
		for _, r := range c.encodedLocked(v, names) {
			resp.Resources = append(resp.Resources, r.named())
		}
		for _, name := range slices.Sorted(maps.Keys(known)) {
			if _, ok := versions[name]; !ok {
				resp.RemovedResources = append(resp.RemovedResources, name)
			}
		}
		if len(resp.Resources)+len(resp.RemovedResources) == 0 && !first && !resuming {
			return false, nil
		}
		out <- &cachev3.DeltaPassthroughResponse{DeltaRequest: req, DeltaDiscoveryResponse: resp, NextVersionMap: versions}
		return true, nil
	})
}

// selected returns the names of the resources that a subscription covers, sorted, and
// their versions. Every subscription covers the unnamed table: a client that does not
// merge cannot request it by name, and istiod ignores names, too.
func (v *view) selected(sub cachev3.Subscription) ([]string, map[string]string) {
	var names []string
	versions := map[string]string{}
	requested := sub.SubscribedResources()
	for name, t := range v.tables {
		if _, named := requested[name]; named || sub.IsWildcard() || (name == "" && len(requested) > 0) {
			names = append(names, name)
			versions[name] = t.version
		}
	}
	slices.Sort(names)
	return names, versions
}

// watch answers a request at once or opens a watch. The function that it returns closes
// the watch; after that nothing is sent. The server's channel has room for one response
// per watch, so sending with the lock held does not block.
func (c *cache) watch(url string, node *corev3.Node, send answer) (func(), error) {
	client, err := parseNode(node)
	if err != nil {
		return nil, err
	}
	if url != typeURL {
		// Istio's agent forwards the subscriptions of its Envoy. An error would end the
		// stream, and with it the pushes of name tables.
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	v, err := c.viewLocked(client)
	if err != nil {
		return nil, err
	}
	answered, err := send(v)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "answering: %v", err)
	}
	if answered {
		return func() {}, nil
	}
	w := &watch{client: client, answer: send, view: v}
	v.watches[w] = struct{}{}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(w.view.watches, w)
	}, nil
}

// viewLocked returns the view of a client, and makes it if there is none.
func (c *cache) viewLocked(client subscriber) (*view, error) {
	if c.waiting != "" {
		return nil, status.Error(codes.Unavailable, "no table has been built yet: "+c.waiting)
	}
	if why := c.missing[client.cluster]; why != "" {
		return nil, status.Error(codes.Unavailable, "there is no table for the client's cluster yet: "+why)
	}
	key := c.keyLocked(client)
	v, ok := c.views[key]
	if !ok {
		v = newView(c.hosts, key)
		c.dropIdleLocked()
		c.views[key] = v
	}
	c.uses++
	v.used = c.uses
	return v, nil
}

// dropIdleLocked makes room for a view without watches: it drops the one that was used
// least recently, if there are as many as there may be.
func (c *cache) dropIdleLocked() {
	var oldest viewKey
	idle := 0
	for key, v := range c.views {
		if len(v.watches) > 0 {
			continue
		}
		if idle++; idle == 1 || v.used < c.views[oldest].used {
			oldest = key
		}
	}
	if idle >= maxIdleViews {
		c.dropViewLocked(oldest)
	}
}

// Fetch is part of the interface but serves only REST, which is not supported.
func (c *cache) Fetch(context.Context, *cachev3.Request) (cachev3.Response, error) {
	return nil, status.Error(codes.Unimplemented, "name tables are served over ADS streams only")
}
