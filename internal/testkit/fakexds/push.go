package fakexds

import (
	"maps"
	"slices"
	"strconv"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
)

// TypeURL is the type of the resources that the server sends.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// resource is one resource of the server's state.
type resource struct {
	version string
	value   []byte
}

// response is one push in both variants, incremental and state-of-the-world. A stream is
// sent the response of its own variant, or nothing if that response is nil. The nonce is
// set when the response is sent.
type response struct {
	version string
	delta   *discoveryv3.DeltaDiscoveryResponse
	sotw    *discoveryv3.DiscoveryResponse
}

// Push sends table to every open and every future stream as one resource without a name,
// as istiod does. It returns the version of the push.
func (s *Server) Push(table *api.NameTable) string {
	return s.PushBytes(marshal(table))
}

// PushBytes is Push with the wire form of a table, which may be malformed.
func (s *Server) PushBytes(value []byte) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	removed := slices.Sorted(maps.Keys(s.resources))
	removed = slices.DeleteFunc(removed, func(name string) bool { return name == "" })
	clear(s.resources)
	return s.pushLocked(map[string][]byte{"": value}, removed)
}

// PushNamed adds or replaces named resources, and removes others. An incremental stream is
// sent only the changes, a state-of-the-world stream all resources. It returns the version
// of the push.
func (s *Server) PushNamed(tables map[string]*api.NameTable, removed ...string) string {
	values := make(map[string][]byte, len(tables))
	for name, table := range tables {
		values[name] = marshal(table)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range removed {
		delete(s.resources, name)
	}
	return s.pushLocked(values, removed)
}

// PushResponses sends responses that the test composed, each to the streams of its
// variant, and to future streams as their first response; nil sends nothing. Only the
// nonce is replaced. It returns the version in delta or, without delta, in sotw.
func (s *Server) PushResponses(delta *discoveryv3.DeltaDiscoveryResponse, sotw *discoveryv3.DiscoveryResponse) string {
	r := composed(delta, sotw)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = r
	s.broadcastLocked(r)
	return r.version
}

// composed returns a push of responses that the test composed.
func composed(delta *discoveryv3.DeltaDiscoveryResponse, sotw *discoveryv3.DiscoveryResponse) *response {
	r := &response{version: delta.GetSystemVersionInfo(), delta: delta, sotw: sotw}
	if delta == nil {
		r.version = sotw.GetVersionInfo()
	}
	return r
}

// pushLocked puts values into the state and sends the change.
func (s *Server) pushLocked(values map[string][]byte, removed []string) string {
	s.version++
	version := "v" + strconv.Itoa(s.version)
	changed := map[string]resource{}
	for name, value := range values {
		r := resource{value: value}
		if name != "" {
			r.version = version // istiod's resource has neither name nor version
		}
		changed[name], s.resources[name] = r, r
	}
	s.state = newResponse(version, s.resources)
	change := newResponse(version, changed)
	change.delta.RemovedResources = removed
	change.sotw = s.state.sotw
	s.broadcastLocked(change)
	return version
}

// broadcastLocked queues r on every stream that has subscribed.
func (s *Server) broadcastLocked(r *response) {
	for st := range s.streams {
		if st.subscribed {
			st.queueLocked(r)
		}
	}
}

// newResponse returns a response with the resources, sorted by name.
func newResponse(version string, resources map[string]resource) *response {
	r := &response{
		version: version,
		delta:   &discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: version, TypeUrl: TypeURL},
		sotw:    &discoveryv3.DiscoveryResponse{VersionInfo: version, TypeUrl: TypeURL},
	}
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		body := &anypb.Any{TypeUrl: TypeURL, Value: resources[name].value}
		r.delta.Resources = append(r.delta.Resources, &discoveryv3.Resource{
			Name: name, Version: resources[name].version, Resource: body,
		})
		r.sotw.Resources = append(r.sotw.Resources, body)
	}
	return r
}

// marshal encodes a table deterministically.
func marshal(table *api.NameTable) []byte {
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		// A string is not UTF-8, which is a mistake in the test.
		panic("fakexds: " + err.Error())
	}
	return value
}
