package push

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// TypeURL is the type of the resource that is sent.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A resource is an encoded table, or a change of one. Responses share the parts.
type resource struct {
	// version is a checksum of the entries, so it is the same on every server with the same objects, and a
	// client that reconnects with this version is not sent the table again.
	version string
	parts   []mem.Buffer // of the NameTable
	size    int          // of them, in bytes
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

// maxEncoded bounds encoded shards, and encoded resources, that are kept, in bytes, unless one alone is larger.
// Clients say which shards they have, so that there may be any number of resources.
const maxEncoded = 32 << 20

// A cache holds encoded bytes by what they are made from.
type cache[K comparable, V any] struct {
	encoded     map[K]V
	size, limit int // in bytes
	sizeOf      func(V) int
}

func newCache[K comparable, V any](limit int, sizeOf func(V) int) cache[K, V] {
	return cache[K, V]{encoded: map[K]V{}, limit: limit, sizeOf: func(v V) int { return sizeOf(v) + overhead }}
}

// overhead is what a cache needs for an element besides its bytes: many have few.
const overhead = 400

// add adds what was encoded. It drops others, in no order, if there are too many.
func (c *cache[K, V]) add(key K, v V) {
	c.size += c.sizeOf(v)
	for other := range c.encoded {
		if c.size <= c.limit {
			break
		}
		c.drop(other)
	}
	c.encoded[key] = v
}

func (c *cache[K, V]) drop(key K) {
	if old, found := c.encoded[key]; found {
		c.size -= c.sizeOf(old)
		delete(c.encoded, key)
	}
}

func (c *cache[K, V]) clear() {
	clear(c.encoded)
	c.size = 0
}

// shardLocked returns the encoded entries of a shard of a view, nil for none.
func (t *tables) shardLocked(v *view, shard int) mem.Buffer {
	all := t.set.Shards()[shard]
	if len(all) == 0 {
		return nil
	}
	id := v.shardID(shard)
	if b, found := t.shards.encoded[id]; found {
		return b
	}
	b := mem.SliceBuffer(concatenate(shown(&v.viewer, all)))
	t.shards.add(id, b)
	return b
}

// A shardID identifies the entries of a shard, as a base or a view has them since they changed
// last.
type shardID struct {
	of      *identity
	shard   int
	changed generation
}

// A resourceID identifies a resource by what it does: it has some shards of the table of a base or a view or, unless
// change is set, all and, if from is not 0, what has changed in others since then.
type resourceID struct {
	change   bool
	of       *identity
	complete digest.Set
	from     generation
}

// wholeLocked returns the table of a view.
func (t *tables) wholeLocked(v *view) *resource {
	id := resourceID{of: v.tableID()}
	if r := t.resources.encoded[id]; r != nil {
		return r
	}
	r := &resource{version: v.version()}
	t.made++
	for shard := range digest.Count {
		r.add(t.shardLocked(v, shard))
	}
	t.resources.add(id, r)
	return r
}
