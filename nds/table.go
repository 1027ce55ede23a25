package nds

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
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

// counts are the length of entries in bytes, their number, and the number of resources.
type counts struct{ bytes, hosts, number int }

// A resource is an immutable part of the table.
type resource struct {
	name, version string
	// parts has the entries, by shard in ascending order; at least one part.
	parts []part
	counts
}

// A part has the entries of a resource in one shard, as a NameTable in wire form, which may have other fields, too.
type part struct {
	shard   int
	entries []byte
}

// digest returns a checksum of the entries.
func (r *resource) digest() string {
	sum := sha256.New()
	for _, p := range r.parts {
		sum.Write(p.entries)
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
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
		counts.number += next.number - previous.number
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

// versions yields the names and versions of all resources.
func (s *shards) versions(yield func(name, version string) bool) {
	for r := range s.all {
		if !yield(r.name, r.version) {
			return
		}
	}
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

// newResource returns the resource whose NameTable is value. The resource may keep value.
func newResource(name, version string, value []byte) (*resource, error) {
	r := &resource{name: name, version: version, counts: counts{number: 1}}
	shard, oneShard := digest.ShardOf(name), true // of the entries so far
	described, info := false, []byte(nil)
	for rest := value; len(rest) > 0; {
		number, kind, n := protowire.ConsumeField(rest)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		field := rest[:n]
		rest = rest[n:]
		switch {
		case kind != protowire.BytesType:
		case number == fieldTable && oneShard: // otherwise Split reads the key
			key, err := digest.KeyOf(field)
			if err != nil {
				return nil, err
			}
			at := digest.ShardOf(key)
			shard, oneShard = at, r.hosts == 0 || at == shard
			fallthrough
		case number == fieldTable:
			r.hosts++
		case number == fieldNameInfo:
			_, _, tag := protowire.ConsumeTag(field)
			text, _ := protowire.ConsumeBytes(field[tag:])
			described, info = true, append(info, text...) // protobuf merges messages by joining them
		}
	}
	if described {
		if name == "" || name[0] == 0 { // a name of sotwRPC.receive
			return nil, errors.New("a name_info in a resource without the name of its host")
		}
		body := protowire.AppendString(protowire.AppendTag(nil, fieldKey, protowire.BytesType), name)
		body = protowire.AppendBytes(protowire.AppendTag(body, fieldInfo, protowire.BytesType), info)
		entry := protowire.AppendBytes(protowire.AppendTag(nil, fieldTable, protowire.BytesType), body)
		if value, oneShard = slices.Concat(value, entry), r.hosts == 0; oneShard {
			value = entry
		}
		r.hosts++
	}
	if oneShard { // no copy: of nametap-discovery's and istiod's resources
		r.parts, r.bytes = []part{{shard, value}}, len(value)
		return r, nil
	}
	entries, err := digest.Split(value)
	for shard := range digest.Count {
		if n := len(entries[shard]); n > 0 {
			r.parts, r.bytes = append(r.parts, part{shard, entries[shard]}), r.bytes+n
		}
	}
	return r, err
}
