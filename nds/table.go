package nds

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
)

// A table is the union of the resources of a control plane. The goroutine of Client.Run owns it.
type table struct {
	// resources has the resources by name. A table that came whole has the name "".
	resources map[string]*resource
	// shards has the same resources by shard. It is immutable, so other goroutines may read it: a change replaces it.
	shards *shards
	counts
}

// shards has, for each shard, the resources with entries in it, in any order. A resource without entries is in the
// shard of its name.
type shards [digest.Count][]*resource

// counts are the length of entries in bytes, and their number.
type counts struct{ bytes, hosts int }

// A resource is an immutable part of the table.
type resource struct {
	name, version string
	// parts has the entries, by shard in ascending order; at least one part.
	parts []part
	counts
}

// A part has the entries of a resource in one shard, as a NameTable in wire form.
type part struct {
	shard   int
	entries []byte
}

func newTable() *table { return &table{resources: map[string]*resource{}, shards: &shards{}} }

// whole reports whether the table came whole.
func (t *table) whole() bool { return t.resources[""] != nil }

// maxAnnounced bounds the names and versions in the first request of a stream. nametap-discovery accepts requests of
// 64 KiB, and other servers 4 MiB.
const maxAnnounced = 32 << 10

// versions returns the versions of the resources that have one, by name. It returns nil if they are too long for a
// request: then the control plane sends all resources.
func (t *table) versions() map[string]string {
	versions, length := map[string]string{}, 0
	for name, r := range t.resources {
		if name == "" || r.version == "" {
			continue
		}
		versions[name] = r.version
		if length += len(name) + len(r.version); length > maxAnnounced {
			return nil
		}
	}
	return versions
}

// An update is a change of a table that is not in use yet.
type update struct {
	resources map[string]*resource // the resources that change, by name; nil for a removed one
	shards    *shards              // of the table after the update
	counts
	// entries has all entries of the shards that differ, in the form of [ApplyFunc].
	entries map[int][]byte
}

// update returns the update that makes the given resources, by name, part of the table; nil removes a resource. Its
// cost depends on these resources and their shards, not on the length of the table. It modifies the map.
func (t *table) update(resources map[string]*resource) update {
	after, counts, none := *t.shards, t.counts, &resource{}
	var added shards
	var touched, differs [digest.Count]bool
	for name, r := range resources {
		previous, next := cmp.Or(t.resources[name], none), cmp.Or(r, none)
		if next.equal(previous) {
			delete(resources, name)
			continue
		}
		counts.bytes += next.bytes - previous.bytes
		counts.hosts += next.hosts - previous.hosts
		for _, p := range previous.parts {
			touched[p.shard] = true
			differs[p.shard] = differs[p.shard] || next.in(p.shard) == nil
		}
		for _, p := range next.parts {
			touched[p.shard], added[p.shard] = true, append(added[p.shard], next)
			differs[p.shard] = differs[p.shard] || !bytes.Equal(p.entries, previous.in(p.shard))
		}
	}
	u := update{resources: resources, shards: &after, counts: counts, entries: map[int][]byte{}}
	for shard := range after {
		if !touched[shard] {
			continue
		}
		kept := slices.DeleteFunc(slices.Clone(after[shard]), func(r *resource) bool {
			_, changed := resources[r.name]
			return changed
		})
		after[shard] = append(kept, added[shard]...)
		if differs[shard] {
			u.entries[shard] = after.entries(shard)
		}
	}
	return u
}

// use makes an update of t part of t.
func (t *table) use(u update) {
	for name, r := range u.resources {
		if r == nil {
			delete(t.resources, name)
		} else {
			t.resources[name] = r
		}
	}
	t.shards, t.counts = u.shards, u.counts
}

// entries returns all entries of a shard.
func (s *shards) entries(shard int) []byte {
	if len(s[shard]) == 1 {
		return s[shard][0].in(shard)
	}
	parts := make([][]byte, len(s[shard]))
	for i, r := range s[shard] {
		parts[i] = r.in(shard)
	}
	return slices.Concat(parts...)
}

// all yields each resource once.
func (s *shards) all(yield func(*resource) bool) {
	for shard, resources := range s {
		for _, r := range resources {
			if r.parts[0].shard == shard && !yield(r) {
				return
			}
		}
	}
}

// digest returns the checksum of the table in the form of Status.Digest.
func (s *shards) digest() string {
	sum := sha256.New()
	for _, r := range slices.SortedFunc(s.all, func(a, b *resource) int { return cmp.Compare(a.name, b.name) }) {
		if r.name == "" {
			return ""
		}
		fmt.Fprintf(sum, "%s %s\n", r.name, r.version)
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// in returns the entries of the resource in a shard, or nil.
func (r *resource) in(shard int) []byte {
	i, found := slices.BinarySearchFunc(r.parts, shard, func(p part, shard int) int { return cmp.Compare(p.shard, shard) })
	if !found {
		return nil
	}
	return r.parts[i].entries
}

func (r *resource) equal(other *resource) bool {
	return r.version == other.version && slices.EqualFunc(r.parts, other.parts, func(a, b part) bool {
		return a.shard == b.shard && bytes.Equal(a.entries, b.entries)
	})
}

// The fields of a NameTable, and of an entry of its map.
const (
	fieldTable    protowire.Number = 1
	fieldNameInfo protowire.Number = 2
	fieldKey      protowire.Number = 1
	fieldInfo     protowire.Number = 2
)

// An entry is an entry of a NameTable in wire form, with its tag and length.
type entry struct {
	shard int
	raw   []byte
}

// usualEntry is the usual length of an entry.
const usualEntry = 64

// newResource returns the resource whose NameTable is value. The resource may keep value.
func newResource(name, version string, value []byte) (*resource, error) {
	entries := make([]entry, 0, 1+len(value)/usualEntry)
	named, info := false, []byte(nil)
	for rest := value; len(rest) > 0; {
		number, kind, n := protowire.ConsumeField(rest)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		field := rest[:n]
		rest = rest[n:]
		switch {
		case kind != protowire.BytesType:
		case number == fieldTable:
			key, err := digest.KeyOf(field)
			if err != nil {
				return nil, err
			}
			entries = append(entries, entry{digest.ShardOf(key), field})
		case number == fieldNameInfo:
			_, _, tag := protowire.ConsumeTag(field)
			text, _ := protowire.ConsumeBytes(field[tag:])
			named, info = true, append(info, text...) // protobuf merges messages by joining them
		}
	}
	if named {
		if name == "" {
			return nil, errors.New("a name_info in a resource without the name of its host")
		}
		entries, value = append(entries, entry{digest.ShardOf(name), hostEntry(name, info)}), nil
	}
	r := &resource{name: name, version: version, counts: counts{hosts: len(entries)}}
	for _, e := range entries {
		r.bytes += len(e.raw)
	}
	r.parts = partsOf(entries, r.bytes, value)
	if len(r.parts) == 0 {
		r.parts = []part{{shard: digest.ShardOf(name)}}
	}
	return r, nil
}

// hostEntry returns the entry of a host.
func hostEntry(host string, info []byte) []byte {
	body := protowire.AppendString(protowire.AppendTag(nil, fieldKey, protowire.BytesType), host)
	body = protowire.AppendBytes(protowire.AppendTag(body, fieldInfo, protowire.BytesType), info)
	return protowire.AppendBytes(protowire.AppendTag(nil, fieldTable, protowire.BytesType), body)
}

// partsOf returns the entries by shard. size is their length. value is the NameTable with these entries: if they are
// all of it, and of one shard, the part is value itself, which saves a copy of most tables of nametap-discovery.
func partsOf(entries []entry, size int, value []byte) []part {
	shard, one := -1, true
	for _, e := range entries {
		one = one && (shard < 0 || e.shard == shard)
		shard = e.shard
	}
	switch {
	case size == 0:
		return nil
	case one && size == len(value):
		return []part{{shard, value}}
	case one:
		joined := make([]byte, 0, size)
		for _, e := range entries {
			joined = append(joined, e.raw...)
		}
		return []part{{shard, joined}}
	}
	var sizes, at [digest.Count]int
	for _, e := range entries {
		sizes[e.shard] += len(e.raw)
	}
	var parts []part
	free := make([]byte, size)
	for shard, n := range sizes {
		if n > 0 {
			at[shard] = len(parts)
			parts, free = append(parts, part{shard, free[:0:n]}), free[n:]
		}
	}
	for _, e := range entries {
		p := &parts[at[e.shard]]
		p.entries = append(p.entries, e.raw...)
	}
	return parts
}
