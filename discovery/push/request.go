package push

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The variants of ADS: state-of-the-world and incremental.
const (
	variantSotw  = "sotw"
	variantDelta = "delta"
)

// MaxMessage bounds a request, in bytes. Istio's agent forwards the requests of its Envoy, which name all clusters that
// the Envoy has. maxUsed bounds what is used of a request, which may need 40 times as much memory when it is decoded.
const (
	MaxMessage = 1 << 20
	maxUsed    = 64 << 10
)

// frameHead is the length of the header that gRPC puts before each message.
const frameHead = 5

// A Request is a DiscoveryRequest or a DeltaDiscoveryRequest.
type Request struct {
	message proto.Message // decoded by [Codec]
	bytes   int           // number of bytes that the request has taken of the stream
	used    int           // number of bytes of it that are used

	node      *corev3.Node // nil in most requests after the first of a stream
	typeURL   string
	nonce     string            // of the push that it answers; empty for none
	rejection *rpcstatus.Status // why it rejects that push; nil if it does not
	versions  [][2][]byte       // names and versions of the resources that the client has, at the start of an incremental stream
}

// newRequest returns a request of a variant, which a codec of [Codec] can decode.
func newRequest(delta bool) *Request {
	if delta {
		return &Request{message: new(discoveryv3.DeltaDiscoveryRequest)}
	}
	return &Request{message: new(discoveryv3.DiscoveryRequest)}
}

// Bytes returns the size of the request in the stream, in bytes, with the header of gRPC.
func (r *Request) Bytes() int { return r.bytes }

// Field numbers: of the initial resource versions in a DeltaDiscoveryRequest, and of the extensions in a Node.
const (
	fieldVersions   = 5
	fieldExtensions = 9
)

// decode decodes what is used of the request, unless that is longer than maxUsed. The names of resources are not: whoever
// requests name tables gets all. An Envoy lists its extensions in 40 KiB, and what it has and requests of other types.
func (r *Request) decode(data []byte) error {
	node, typeURL := protowire.Number(2), protowire.Number(4)
	if r.delta() {
		node, typeURL = 1, 2
	}
	wanted := string(last(data, typeURL)) == TypeURL
	r.bytes = len(data) + frameHead
	var used []byte
	for rest := data; len(rest) > 0; {
		number, kind, n := protowire.ConsumeField(rest)
		if n < 0 {
			return protowire.ParseError(n)
		}
		field := rest[:n]
		rest = rest[n:]
		versions, names := r.delta() && number == fieldVersions, number == 3 || r.delta() && number == 4
		switch {
		case names, versions && !wanted:
			continue
		case versions: // as a map, those of 512 resources would take as much as all else that a new stream costs
			entry := last(field, fieldVersions)
			r.versions = append(r.versions, [2][]byte{last(entry, 1), last(entry, 2)})
		case number == node && kind == protowire.BytesType:
			field = protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), withoutExtensions(last(field, node)))
			used = append(used, field...)
		default:
			used = append(used, field...)
		}
		if r.used += len(field); r.used > maxUsed {
			return nil
		}
	}
	if err := proto.Unmarshal(used, r.message); err != nil {
		return err
	}
	switch m := r.message.(type) {
	case *discoveryv3.DeltaDiscoveryRequest:
		r.node, r.typeURL, r.nonce, r.rejection = m.GetNode(), m.GetTypeUrl(), m.GetResponseNonce(), m.GetErrorDetail()
	case *discoveryv3.DiscoveryRequest:
		r.node, r.typeURL, r.nonce, r.rejection = m.GetNode(), m.GetTypeUrl(), m.GetResponseNonce(), m.GetErrorDetail()
	}
	return nil
}

func (r *Request) delta() bool {
	_, delta := r.message.(*discoveryv3.DeltaDiscoveryRequest)
	return delta
}

// last returns the content of the last field with a number, which counts; nil if there is none.
func last(message []byte, wanted protowire.Number) (found []byte) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeField(message)
		if n < 0 {
			return nil
		}
		if number == wanted && kind == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(message)
			found, _ = protowire.ConsumeBytes(message[tag:])
		}
		message = message[n:]
	}
	return found
}

// withoutExtensions returns a Node without its extensions, up to the first field that is malformed, which stays.
func withoutExtensions(node []byte) (rest []byte) {
	for len(node) > 0 {
		number, _, n := protowire.ConsumeField(node)
		if n < 0 {
			return append(rest, node...)
		}
		if number != fieldExtensions {
			rest = append(rest, node[:n]...)
		}
		node = node[n:]
	}
	return rest
}
