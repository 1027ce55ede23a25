package push

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
)

// The variants of ADS: state-of-the-world and incremental.
const (
	variantSotw  = "sotw"
	variantDelta = "delta"
)

// MaxMessage bounds a request, in bytes. A decoded request may need 40 times as much memory.
const MaxMessage = 64 << 10

// frameHead is the length of the header that gRPC puts before each message.
const frameHead = 5

// A Request is a DiscoveryRequest or a DeltaDiscoveryRequest.
type Request struct {
	message proto.Message // decoded by [Codec]
	bytes   int           // number of bytes that the request has taken of the stream

	node      *corev3.Node // nil in most requests after the first of a stream
	typeURL   string
	nonce     string            // of the push that it answers; empty for none
	rejection *rpcstatus.Status // why it rejects that push; nil if it does not
	names     []string          // of the requested resources; in the incremental variant of the added ones
	removed   []string          // names of resources from which it unsubscribes
	versions  map[string]string // of the resources that the client has, at the start of an incremental stream
}

// wildcard is the name of all resources. A first request without names means the same.
const wildcard = "*"

// newRequest returns a request of a variant, into which a message can be decoded.
func newRequest(delta bool) *Request {
	if delta {
		return &Request{message: new(discoveryv3.DeltaDiscoveryRequest)}
	}
	return &Request{message: new(discoveryv3.DiscoveryRequest)}
}

// Bytes returns the size of the request in the stream, in bytes, with the header of gRPC.
func (r *Request) Bytes() int { return r.bytes }

// read sets the fields after the message was decoded.
func (r *Request) read() {
	switch m := r.message.(type) {
	case *discoveryv3.DeltaDiscoveryRequest:
		r.node, r.typeURL, r.nonce, r.rejection = m.GetNode(), m.GetTypeUrl(), m.GetResponseNonce(), m.GetErrorDetail()
		r.names, r.removed, r.versions = m.GetResourceNamesSubscribe(), m.GetResourceNamesUnsubscribe(), m.GetInitialResourceVersions()
	case *discoveryv3.DiscoveryRequest:
		r.node, r.typeURL, r.nonce, r.rejection = m.GetNode(), m.GetTypeUrl(), m.GetResponseNonce(), m.GetErrorDetail()
		r.names = m.GetResourceNames()
	}
}
