package push

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Field numbers of the messages that are encoded here. Those of both responses are equal, as far as they
// have the same fields.
const (
	fieldVersion = 1
	fieldTypeURL = 4
	fieldNonce   = 5
	fieldRemoved = 6 // of DeltaDiscoveryResponse

	fieldAnyTypeURL = 1

	fieldResVersion = 1
	fieldResName    = 3

	// fieldInner is that of what a message is made around: the resources of a response, the resource of a
	// Resource, the value of an Any.
	fieldInner = 2
)

// codec is gRPC's codec, except that it sends an encoded response as it is. All streams share the bytes of
// its resources: a push to 10,000 clients, or one that a slow client does not read, costs a hundred
// bytes per stream instead of a table.
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

// An encodedResponse is a DiscoveryResponse or a DeltaDiscoveryResponse.
type encodedResponse mem.BufferSlice

// encode returns the response in the incremental variant, or in that of state-of-the-world. The nonce is last: a
// client that knows it has received the whole response.
func (p *response) encode(delta bool) encodedResponse {
	own := appendString(make([]byte, 0, 144), fieldVersion, p.version)
	own = appendString(own, fieldTypeURL, TypeURL)
	for _, name := range p.removed {
		own = protowire.AppendString(protowire.AppendTag(own, fieldRemoved, protowire.BytesType), name)
	}
	head := len(own)
	own = appendString(own, fieldNonce, p.nonce)
	out := append(make(encodedResponse, 0, 2+2*len(p.resources)), mem.SliceBuffer(own[:head]))
	for _, r := range p.resources {
		if delta {
			out = append(out, r.incremental[:]...)
		} else {
			out = append(out, r.whole[:]...)
		}
	}
	return append(out, mem.SliceBuffer(own[head:]))
}

// appendString appends a field, unless it is empty.
func appendString(to []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return to
	}
	return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), value)
}

// A message is an encoded one in two parts, of which the second is shared with other messages.
type message struct{ head, tail []byte }

// buffers returns the parts in the form that gRPC sends, so that no response has to make it.
func (m message) buffers() [2]mem.Buffer {
	return [2]mem.Buffer{mem.SliceBuffer(m.head), mem.SliceBuffer(m.tail)}
}

// in returns another message around this one, which begins with some other fields.
func (m message) in(others []byte) message {
	head := protowire.AppendTag(others, fieldInner, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(m.head)+len(m.tail)))
	return message{append(head, m.head...), m.tail}
}
