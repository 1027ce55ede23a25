package table

import "github.com/nametap/nametap/dnsproxy/wire"

// shardCount is the number of shards of a table. A push that changes one host of 100,000
// builds one shard of some 400 hosts.
const (
	shardBits  = 8
	shardCount = 1 << shardBits
)

// shardOf returns the shard of a hash.
func shardOf(hash uint64) int { return int(hash >> (64 - shardBits)) } //nolint:gosec // eight bits

// A digest identifies the set of entries of a shard, in any order. Two different sets have
// the same digest with a probability of 2^-64.
type digest struct {
	sum     uint64 // of the entries' hashes
	entries int
}

// A shard holds the hosts whose names hash to it. It is immutable; the zero value is empty.
type shard struct {
	digest  digest
	records []byte
	// index maps the hash of a name to the offset of its record plus one: open addressing
	// in a power of two that is never full. It is empty without records.
	index            []uint32
	hosts, wildcards int

	// These are rare: invalid entries, names that two entries claim, and names that cannot
	// be derived from a host's FQDN.
	skipped    []Skipped
	collisions []Collision
	claims     []claim
}

// A claim is a name besides its FQDN by which a host wants to be found.
type claim struct {
	name wire.Name
	fqdn wire.Name
	key  string // the host's
}

// find returns the host with a name whose hash is hash.
func (s *shard) find(hash uint64, name wire.Name) (h Host, ok bool) {
	if len(s.index) == 0 {
		return Host{}, false
	}
	mask := uint64(len(s.index) - 1)
	for i := hash & mask; s.index[i] != 0; i = (i + 1) & mask {
		record := s.records[s.index[i]-1:]
		if int(record[1]) == len(name) && string(record[recordNameOffset:][:len(name)]) == string(name) {
			return viewHost(record), true
		}
	}
	return Host{}, false
}

// all yields the hosts, in the order of their names.
func (s *shard) all(yield func(Host) bool) {
	for rest := s.records; len(rest) > 0; {
		h := viewHost(rest)
		if !yield(h) {
			return
		}
		rest = rest[recordLen(rest):]
	}
}
