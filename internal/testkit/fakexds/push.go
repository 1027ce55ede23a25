package fakexds

import (
	"strconv"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
)

// TypeURL is the type of the resources that the server sends.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

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
	s.version++
	// istiod's resource has neither name nor version.
	body := &anypb.Any{TypeUrl: TypeURL, Value: value}
	s.state = &response{
		version: "v" + strconv.Itoa(s.version),
		delta:   &discoveryv3.DeltaDiscoveryResponse{TypeUrl: TypeURL, Resources: []*discoveryv3.Resource{{Resource: body}}},
		sotw:    &discoveryv3.DiscoveryResponse{TypeUrl: TypeURL, Resources: []*anypb.Any{body}},
	}
	s.state.delta.SystemVersionInfo, s.state.sotw.VersionInfo = s.state.version, s.state.version
	s.broadcastLocked(s.state)
	return s.state.version
}

// PushResponses sends responses that the test composed, each to the streams of its
// variant, and to future streams as their first response; nil sends nothing. Only the
// nonce is replaced. It returns the version in delta or, without delta, in sotw.
func (s *Server) PushResponses(delta *discoveryv3.DeltaDiscoveryResponse, sotw *discoveryv3.DiscoveryResponse) string {
	r := &response{version: delta.GetSystemVersionInfo(), delta: delta, sotw: sotw}
	if delta == nil {
		r.version = sotw.GetVersionInfo()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = r
	s.broadcastLocked(r)
	return r.version
}

// broadcastLocked queues r on every stream that has subscribed.
func (s *Server) broadcastLocked(r *response) {
	for st := range s.streams {
		if st.subscribed {
			st.queueLocked(r)
		}
	}
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
