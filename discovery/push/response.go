package push

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/discovery/hosts"
)

// TypeURL is the type of the resource that is sent.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A response is a response of either variant before it is encoded.
type response struct {
	nonce, version string
	resource       *resource // nil for none
}

// encode returns the response in the incremental or the state-of-the-world variant. The nonce is
// last: a client that knows the nonce has received the whole response.
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

// An encodedResponse is a DiscoveryResponse or a DeltaDiscoveryResponse.
type encodedResponse mem.BufferSlice

// Field numbers of the messages that are encoded here. The fields that both responses share have the same
// numbers in both.
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

// A resource is an encoded table, or a change of one. Responses share the parts.
type resource struct {
	// version is a checksum of the entries, so it is the same on every server with the same objects, and a
	// client that reconnects with this version is not sent the table again.
	version string
	parts   []mem.Buffer // of the NameTable
	size    int          // of all parts, in bytes
}

// add adds a part.
func (r *resource) add(part mem.Buffer) {
	if part != nil && part.Len() > 0 {
		r.parts, r.size = append(r.parts, part), r.size+part.Len()
	}
}

// appendHead appends what comes before the parts in a response of either variant.
func (r *resource) appendHead(to []byte, delta bool) []byte {
	sized := func(tag protowire.Number, n int) int { return protowire.SizeTag(tag) + protowire.SizeBytes(n) }
	body := sized(fieldAnyTypeURL, len(TypeURL)) + sized(fieldInner, r.size)
	if delta {
		size := sized(fieldInner, body)
		if r.version != "" {
			size += sized(fieldResVersion, len(r.version))
		}
		to = appendTagSize(to, fieldInner, size)
		to = appendString(to, fieldResVersion, r.version)
	}
	to = appendTagSize(to, fieldInner, body)
	return appendTagSize(appendString(to, fieldAnyTypeURL, TypeURL), fieldInner, r.size)
}

// appendTagSize appends the start of a field of n bytes.
func appendTagSize(to []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(to, field, protowire.BytesType), uint64(n)) //nolint:gosec // not negative
}

// appendString appends a field, unless it is empty.
func appendString(to []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return to
	}
	return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), value)
}

// shown returns the entries of hosts that a viewer sees, in their order.
func shown(v *hosts.Viewer, all []*hosts.Host) []*hosts.Entry {
	entries := make([]*hosts.Entry, 0, len(all))
	for _, h := range all {
		if e := v.Entry(h); e != nil {
			entries = append(entries, e)
		}
	}
	return entries
}

// concatenate returns the table of some entries.
func concatenate(entries []*hosts.Entry) []byte {
	size := 0
	for _, e := range entries {
		size += len(e.Encoded)
	}
	table := make([]byte, 0, size)
	for _, e := range entries {
		table = append(table, e.Encoded...)
	}
	return table
}
