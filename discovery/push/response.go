package push

import (
	"slices"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// TypeURL is the type of the resources that are sent.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// Field numbers of the messages that are encoded here. A field that is in the responses of both variants has the same
// number in both.
const (
	fieldVersion = 1
	fieldTypeURL = 4
	fieldNonce   = 5
	fieldRemoved = 6

	fieldAnyTypeURL = 1

	fieldResourceVersion = 1
	fieldResourceName    = 3

	// fieldInner is the field with the content of a message: the resources of a response, the resource
	// of a Resource, the value of an Any.
	fieldInner = 2
)

// An encodedResponse is a DiscoveryResponse or a DeltaDiscoveryResponse. Streams share its parts.
type encodedResponse mem.BufferSlice

// A push has the fields from which a response is encoded.
type push struct {
	version   string       // of the whole table; may be empty
	resources []mem.Buffer // encoded
	removed   []string     // names of resources
	unused    int          // bytes of resources that no other push has used
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
	used            bool // by a push; guarded by tables.encoding
}

// newEncoded returns the bytes of a NameTable as a resource with a name.
func newEncoded(name, version string, content []byte) *encoded {
	head := headOf(appendString(appendString(nil, fieldResourceName, name), fieldResourceVersion, version), len(content))
	resource := append(slices.Grow(head, len(content)), content...)
	return &encoded{resource: resource, table: resource[len(head):]}
}

// newWhole returns a resource without a name in a response of either variant. The parameter parts has its NameTable.
func newWhole(delta bool, version string, parts []mem.Buffer) []mem.Buffer {
	var own []byte
	if delta {
		own = appendString(nil, fieldResourceVersion, version)
	}
	return append([]mem.Buffer{mem.SliceBuffer(headOf(own, mem.BufferSlice(parts).Len()))}, parts...)
}

// headOf returns what comes before a NameTable of n bytes in the resources of a response. The parameter own has the
// fields of a Resource; without them, the resource is an Any, as in the state-of-the-world variant.
func headOf(own []byte, n int) (head []byte) {
	sized := func(tag protowire.Number, n int) int { return protowire.SizeTag(tag) + protowire.SizeBytes(n) }
	body := sized(fieldAnyTypeURL, len(TypeURL)) + sized(fieldInner, n)
	if len(own) > 0 {
		head = append(appendTagSize(nil, fieldInner, len(own)+sized(fieldInner, body)), own...)
	}
	head = appendString(appendTagSize(head, fieldInner, body), fieldAnyTypeURL, TypeURL)
	return appendTagSize(head, fieldInner, n)
}

// appendTagSize appends the tag and the size of a field of n bytes.
func appendTagSize(to []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(to, field, protowire.BytesType), uint64(n)) //nolint:gosec // not negative
}

// appendString appends a field, unless its value is empty.
func appendString(to []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return to
	}
	return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), value)
}
