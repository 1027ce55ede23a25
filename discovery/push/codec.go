package push

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// codec is gRPC's codec, except that it decodes only what is used of a [Request], and sends an encoded response as it is.
// All streams share the bytes of the response's resources: a push to 10,000 clients, or a push that a slow client does not
// read, costs a hundred bytes per stream instead of a table.
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
		return r.decode(data.Materialize())
	}
	return c.CodecV2.Unmarshal(data, v)
}
