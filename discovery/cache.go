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

// typeURL is the type of the resources that are served.
const typeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// cache serves the views of one snapshot after the other to go-control-plane's
// server, which holds the streams. go-control-plane's own LinearCache does not
// fit: in state-of-the-world it sends only the resources that changed unless
// the type is a cluster or a listener, and here every response must be whole.
//
// A watch waits for one response. The server opens the next one when the
// client has answered, so a client never has two pushes in flight and always
// gets the latest state.
type cache struct {
	mu      sync.Mutex
	snap    *snapshot // nil before the first build
	waiting string    // why there is no snapshot
	views   map[viewKey]*view
}

// view is what the clients with one key are served. Guarded by cache.mu.
type view struct {
	resources map[string]*resource // by resource name
	version   string               // of all resources together
	// watches are the requests that wait for a change.
	watches map[*watch]struct{}
}

// resource is one marshalled table. The bytes are shared by all responses.
type resource struct {
	name    string
	body    *anypb.Any
	version string
	wrapped *anypb.Any // body for state-of-the-world, made when first wanted
}

// watch is a request that waits. Its answer reports whether the view holds
// something new for the client, and if so has sent it.
type watch struct {
	answer answer
}

type answer func(*view) (bool, error)

func newCache() *cache { return &cache{views: map[viewKey]*view{}} }

// waitingFor sets what clients are told while there is no snapshot.
func (c *cache) waitingFor(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = why
}

// set makes a snapshot effective and answers the watches for which something
// differs. Views that nobody waits on are dropped; a client that is about to
// answer a push makes its view anew.
func (c *cache) set(snap *snapshot) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.snap = snap
	for key, old := range c.views {
		if len(old.watches) == 0 {
			delete(c.views, key)
			continue
		}
		next, err := newView(snap, key)
		if err != nil {
			return err
		}
		old.resources, old.version = next.resources, next.version
		for w := range old.watches {
			answered, err := w.answer(old)
			if err != nil {
				return err
			}
			if answered {
				delete(old.watches, w)
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

// newResource marshals a table. Its version is a checksum of the bytes, so it
// is the same on every server that has the same objects, and a client that
// comes back with it need not be sent the table again.
func newResource(name string, t *api.NameTable) (*resource, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	return &resource{name: name, body: &anypb.Any{TypeUrl: typeURL, Value: data}, version: checksum(data)}, nil
}

// wholeLocked is the resource's form in a state-of-the-world response, which
// has no place for names: one that has a name comes in xDS's wrapper.
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
	// The version in the request is not looked at: after a NACK it is the one
	// before, and sending again what was just refused would go on for ever.
	first := req.GetResponseNonce() == ""
	return c.watch(req.GetTypeUrl(), req.GetNode(), func(v *view) (bool, error) {
		names, versions := v.selected(sub)
		if version, unnamed := versions[""]; unnamed {
			// With every request the server forgets what was sent under names
			// that are not asked for; remembered as "" alone, the table would
			// be sent again on each acknowledgement.
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
	// The first request is answered even if the client has everything: it
	// waits to hear so.
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

// selected gives the names that a subscription covers, sorted, and their
// versions. The unnamed table goes to everyone who asks for anything: a client
// that does not merge cannot ask for it by name, and istiod ignores names too.
func (v *view) selected(sub cachev3.Subscription) ([]string, map[string]string) {
	var names []string
	versions := map[string]string{}
	asked := sub.SubscribedResources()
	for name, r := range v.resources {
		if _, named := asked[name]; named || sub.IsWildcard() || (name == "" && len(asked) > 0) {
			names = append(names, name)
			versions[name] = r.version
		}
	}
	slices.Sort(names)
	return names, versions
}

// watch answers at once or opens a watch; the function that it returns closes
// the watch, and after it nothing is sent. The server's channel has room for
// one response of a watch, so sending under the lock does not block.
func (c *cache) watch(url string, node *corev3.Node, ask answer) (func(), error) {
	key, err := parseNode(node)
	if err != nil {
		return nil, err
	}
	if url != typeURL {
		// Istio's agent hands on what its Envoy asks for. To refuse that would
		// end the stream, and the name tables with it.
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	v, err := c.viewLocked(key)
	if err != nil {
		return nil, err
	}
	answered, err := ask(v)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "answering: %v", err)
	}
	if answered {
		return func() {}, nil
	}
	w := &watch{answer: ask}
	v.watches[w] = struct{}{}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(v.watches, w)
	}, nil
}

func (c *cache) viewLocked(key viewKey) (*view, error) {
	if v, ok := c.views[key]; ok {
		return v, nil
	}
	if c.snap == nil {
		return nil, status.Error(codes.Unavailable, "no table has been built yet: "+c.waiting)
	}
	v, err := newView(c.snap, key)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "building the view of %+v: %v", key, err)
	}
	c.views[key] = v
	return v, nil
}

// Fetch is REST's way to ask, which is not served.
func (c *cache) Fetch(context.Context, *cachev3.Request) (cachev3.Response, error) {
	return nil, status.Error(codes.Unimplemented, "name tables are served over ADS streams only")
}
