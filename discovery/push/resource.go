package push

import (
	"cmp"
	"slices"

	"google.golang.org/grpc/mem"

	"github.com/nametap/nametap/discovery/hosts"
)

// TypeURL is the type of the resources that are sent.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// wrapperURL is the type of the wrapper that gives a resource a name in state-of-the-world, whose responses
// have no field for names.
const wrapperURL = "type.googleapis.com/envoy.service.discovery.v3.Resource"

// A resource is an encoded table, or a change of one. All responses share the bytes.
type resource struct {
	version     string
	table       []byte
	whole       [2]mem.Buffer // the field of a state-of-the-world response
	incremental [2]mem.Buffer // that of an incremental response
}

// newResource returns the resource of an encoded table. The version is a checksum of its entries, so it
// is the same on every server with the same objects, and a client that reconnects with this version
// is not sent the table again.
func newResource(name, version string, table []byte) *resource {
	body := message{tail: table}.in(appendString(nil, fieldAnyTypeURL, TypeURL))
	named := body.in(appendString(appendString(nil, fieldResName, name), fieldResVersion, version))
	whole := body
	if name != "" {
		whole = named.in(appendString(nil, fieldAnyTypeURL, wrapperURL))
	}
	return &resource{version: version, table: table, incremental: named.in(nil).buffers(), whole: whole.in(nil).buffers()}
}

// concatenate returns the table of entries, sorted by host. It reserves room for more bytes.
func concatenate(entries []*hosts.Entry, more int) []byte {
	slices.SortFunc(entries, func(a, b *hosts.Entry) int { return cmp.Compare(a.Host, b.Host) })
	size := more
	for _, e := range entries {
		size += len(e.Encoded)
	}
	table := make([]byte, 0, size)
	for _, e := range entries {
		table = append(table, e.Encoded...)
	}
	return table
}
