package push

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/discovery/hosts"
)

// TypeURL is the type of the resource that is sent.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A response has the fields from which a DiscoveryResponse or a DeltaDiscoveryResponse is encoded.
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

// Field numbers of the messages that are encoded here. A field that is in the responses of both variants has the same
// number in both.
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

// A resource is an encoded table, or an encoded change of a table. Many responses share its parts.
type resource struct {
	// version is a checksum of the entries of a table; empty for a change. It is the same on every server with the same
	// objects, so a client that connects again with this version is not sent the table again.
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

// shown returns the entries that a viewer sees of some hosts, in the order of the hosts.
func shown(v *hosts.Viewer, all []*hosts.Host) []*hosts.Entry {
	entries := make([]*hosts.Entry, 0, len(all))
	for _, h := range all {
		if e := v.Entry(h); e != nil {
			entries = append(entries, e)
		}
	}
	return entries
}

// concatenate returns the encoded table of some entries.
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
