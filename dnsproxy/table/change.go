package table

import (
	"fmt"
	"hash/maphash"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// ShardOf returns the shard of the host with a key, in any case. It is the same for all tables that
// follow from one by Next and With, and another one in another process.
func (t *Table) ShardOf(key string) int {
	var name [wire.MaxNameLen]byte
	return shardOf(maphash.Bytes(t.seed, foldKey(name[:0], key)))
}

// With returns a table with other shards: shards has all entries of each, a NameTable in wire form.
// The other shards are those of t or, if whole is set, empty; then all of the table is built anew. It
// returns t if nothing has changed. On an error no entry is used. The table does not keep shards.
func (t *Table) With(shards map[int][]byte, whole bool) (*Table, error) {
	if whole {
		t = t.empty()
	}
	b := builder{cluster: &t.Cluster, seed: t.seed}
	var entries [shardCount][][]byte
	var changed []int
	for i := range t.shards {
		content, given := shards[i]
		if !given {
			continue
		}
		for raw, err := range wireEntries(content) {
			var entry wireEntry
			if err == nil {
				entry, err = parseWireEntry(raw)
			}
			if at := t.ShardOf(viewString(entry.key)); err == nil && at != i {
				err = fmt.Errorf("host %q is of shard %d", entry.key, at)
			}
			if err != nil {
				return nil, fmt.Errorf("shard %d (%d bytes): %w", i, len(content), err)
			}
			entries[i] = append(entries[i], raw)
			b.digests[i].add(t.seed, raw)
		}
		if b.digests[i] != t.shards[i].digest {
			changed = append(changed, i)
		}
	}
	if len(changed) == 0 {
		return t, nil
	}
	return t.rebuild(&b, &entries, changed)
}

// Damaged reports whether a shard has changed in memory since it was built. Names that cannot be derived
// from a host's FQDN, and the hosts of addresses, are not checked.
func (t *Table) Damaged(shard int) bool {
	s := &t.shards[shard]
	return s.sum(t.seed) != s.built
}

// sum returns a checksum of the shard's hosts. Each step can be reversed, so that one changed slot of the
// index always changes the sum.
func (s *shard) sum(seed maphash.Seed) uint64 {
	const odd = 0x9e3779b97f4a7c15 // the golden ratio
	var sum uint64
	if len(s.records) > 0 {
		sum = maphash.Bytes(seed, s.records)
	}
	for _, slot := range s.index {
		sum = (sum ^ uint64(slot)) * odd
	}
	return sum
}
