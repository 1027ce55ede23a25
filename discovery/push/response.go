package push

import (
	"slices"
	"sync/atomic"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
)

// TypeURL is the type of the resources that are sent.
const TypeURL = digest.TypeURL

// Field numbers of the responses of both variants.
const (
	fieldVersion = 1
	fieldTypeURL = 4
	fieldNonce   = 5
	fieldRemoved = 6 // only of the incremental variant
)

// An encodedResponse is a DiscoveryResponse or a DeltaDiscoveryResponse. Streams share its parts.
type encodedResponse mem.BufferSlice

// A push has the fields from which a response is encoded.
type push struct {
	version   string       // of the whole table; may be empty
	resources []mem.Buffer // encoded
	removed   []string     // names of resources
	unused    []*encoded   // resources that no other push has used
}

// newResponse returns the response of a push. The nonce is last: a client that knows the nonce has received the whole
// response.
func newResponse(p *push, nonce string) encodedResponse {
	head := appendString(appendString(nil, fieldVersion, p.version), fieldTypeURL, TypeURL)
	var tail []byte
	for _, name := range p.removed {
		tail = protowire.AppendString(protowire.AppendTag(tail, fieldRemoved, protowire.BytesType), name)
	}
	response := append(make(encodedResponse, 0, 2+len(p.resources)), mem.SliceBuffer(head))
	return append(append(response, p.resources...), mem.SliceBuffer(appendString(tail, fieldNonce, nonce)))
}

// encoded has the bytes of a shard: the resource in a response of the incremental variant, and the NameTable at the end
// of this resource.
type encoded struct {
	resource, table mem.SliceBuffer
	used            atomic.Bool // by a push that was sent
}

// newEncoded returns the bytes of a NameTable as a resource with a name.
func newEncoded(name, version string, content []byte) *encoded {
	head := digest.ResourceHead(name, version, len(content))
	resource := append(slices.Grow(head, len(content)), content...)
	return &encoded{resource: resource, table: resource[len(head):]}
}

// newWhole returns a resource without a name in a response of either variant. The parameter parts has its NameTable.
func newWhole(delta bool, version string, parts []mem.Buffer) []mem.Buffer {
	size := mem.BufferSlice(parts).Len()
	head := digest.AnyHead(size)
	if delta {
		head = digest.ResourceHead("", version, size)
	}
	return append([]mem.Buffer{mem.SliceBuffer(head)}, parts...)
}

// appendString appends a field, unless its value is empty.
func appendString(to []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return to
	}
	return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), value)
}

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
