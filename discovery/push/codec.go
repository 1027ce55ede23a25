package push

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Field numbers of the messages that are encoded here. Both responses number the fields that they
// share equally.
const (
	fieldVersion = 1
	fieldTypeURL = 4
	fieldNonce   = 5

	fieldAnyTypeURL = 1

	fieldResVersion = 1

	// fieldInner is the field with the content of a message: the resources of a response, the resource
	// of a Resource, the value of an Any.
	fieldInner = 2
)

// codec is gRPC's codec, except that it decodes a [Request], and sends an encoded response as it is. All streams
// share the bytes of its resources: a push to 10,000 clients, or one that a slow client does not read, costs a
// hundred bytes per stream instead of a table.
type codec struct{ encoding.CodecV2 }

// Codec returns the codec that a server needs to serve [Service].
func Codec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

// Marshal encodes a message.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(encodedResponse); ok {
		return mem.BufferSlice(m), nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal decodes a message.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if r, ok := v.(*Request); ok {
		r.decode(data)
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// An encodedResponse is a DiscoveryResponse or a DeltaDiscoveryResponse.
type encodedResponse mem.BufferSlice

// encode returns the response in the incremental or the state-of-the-world variant. The nonce is
// last: a client that knows it has received the whole response.
func (p *response) encode(delta bool) encodedResponse {
	own := appendString(make([]byte, 0, 320), fieldVersion, p.version)
	own = appendString(own, fieldTypeURL, TypeURL)
	var parts []mem.Buffer
	if p.resource != nil {
		own, parts = p.resource.appendHead(own, delta), p.resource.parts
	}
	head := len(own)
	own = appendString(own, fieldNonce, p.nonce)
	out := append(make(encodedResponse, 0, 2+len(parts)), mem.SliceBuffer(own[:head]))
	return append(append(out, parts...), mem.SliceBuffer(own[head:]))
}

// appendString appends a field, unless it is empty.
func appendString(to []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return to
	}
	return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), value)
}
