package discovery

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
)

// typeURL is the type of the served resources.
const typeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// cache serves the views of the current snapshot to go-control-plane's server, which
// handles the streams. go-control-plane's LinearCache is not usable: in state-of-the-world
// it sends only the resources that changed, unless they are clusters or listeners, but a
// NameTable response must be complete.
//
// A watch waits for one response. The server opens the next watch when the client has
// answered, so a client never has two pushes in flight and always gets the latest state.
type cache struct {
	mu      sync.Mutex
	snap    *snapshot // nil before the first build
	waiting string    // why there is no snapshot
	views   map[viewKey]*view
	uses    uint64 // of views, counted
}

// maxIdleViews bounds the views without watches. A client chooses its view, and each view
// has a copy of the tables.
const maxIdleViews = 64

// view holds the tables of the clients with one key. It is guarded by cache.mu.
type view struct {
	resources map[string]*resource // by resource name
	version   string               // of all resources together
	// watches holds the requests that wait for a change.
	watches map[*watch]struct{}
	used    uint64 // cache.uses at the last use
}

// resource is an encoded table. All responses share the bytes.
type resource struct {
	name    string
	body    *anypb.Any
	version string
	wrapped *anypb.Any // body for state-of-the-world, made when first needed
}

// watch is a request that waits. answer sends what the view holds that is new for the
// client, and reports whether there was anything.
type watch struct {
	client subscriber
	answer answer
	view   *view // that it waits for
}

type answer func(*view) (bool, error)

func newCache() *cache { return &cache{views: map[viewKey]*view{}} }

// waitingFor sets the reason that is sent to clients while there is no snapshot.
func (c *cache) waitingFor(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = why
}

// set makes snap the current snapshot and answers the watches for which something has
// changed. Another Sidecar may give a client another view. It drops views without watches; a
// client that is about to answer a push creates its view again.
func (c *cache) set(snap *snapshot) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	views := map[viewKey]*view{}
	for _, old := range c.views {
		for w := range old.watches {
			key := snap.view(w.client)
			v, ok := views[key]
			if !ok {
				var err error
				if v, err = newView(snap, key); err != nil {
					return err
				}
				views[key] = v
			}
			v.watches[w] = struct{}{}
		}
	}
	c.snap, c.views = snap, views
	for _, v := range views {
		for w := range v.watches {
			w.view = v
			answered, err := w.answer(v)
			if err != nil {
				return err
			}
			if answered {
				delete(v.watches, w)
			}
		}
	}
	return nil
}

func newView(snap *snapshot, key viewKey) (*view, error) {
	v := &view{resources: map[string]*resource{}, watches: map[*watch]struct{}{}}
	var all []byte
	tables := snap.tables(key)
	for _, name := range sortedKeys(tables) {
		r, err := newResource(name, tables[name])
		if err != nil {
			return nil, fmt.Errorf("table %q: %w", name, err)
		}
		v.resources[name] = r
		all = fmt.Appendf(all, "%q %s\n", name, r.version)
	}
	v.version = checksum(all)
	return v, nil
}

// newResource encodes a table. The version is a checksum of the bytes, so it is the same
// on every server with the same objects, and a client that reconnects with this version
// is not sent the table again.
func newResource(name string, t *api.NameTable) (*resource, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("encoding: %w", err)
	}
	return &resource{name: name, body: &anypb.Any{TypeUrl: typeURL, Value: data}, version: checksum(data)}, nil
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

func (r *resource) named() *discoveryv3.Resource {
	return &discoveryv3.Resource{Name: r.name, Version: r.version, Resource: r.body}
}

func checksum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:16])
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
		resp := &discoveryv3.DiscoveryResponse{TypeUrl: typeURL, VersionInfo: v.version}
		for _, name := range names {
			body, err := v.resources[name].wholeLocked()
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
		resp := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: typeURL, SystemVersionInfo: v.version}
		for _, name := range names {
			if r := v.resources[name]; known[name] != r.version {
				resp.Resources = append(resp.Resources, r.named())
			}
		}
		for _, name := range sortedKeys(known) {
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
	for name, r := range v.resources {
		if _, named := requested[name]; named || sub.IsWildcard() || (name == "" && len(requested) > 0) {
			names = append(names, name)
			versions[name] = r.version
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
	if c.snap == nil {
		return nil, status.Error(codes.Unavailable, "no table has been built yet: "+c.waiting)
	}
	key := c.snap.view(client)
	v, ok := c.views[key]
	if !ok {
		var err error
		if v, err = newView(c.snap, key); err != nil {
			return nil, status.Errorf(codes.Internal, "building the view of %+v: %v", key, err)
		}
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
		delete(c.views, oldest)
	}
}

// Fetch is part of the interface but serves only REST, which is not supported.
func (c *cache) Fetch(context.Context, *cachev3.Request) (cachev3.Response, error) {
	return nil, status.Error(codes.Unimplemented, "name tables are served over ADS streams only")
}
