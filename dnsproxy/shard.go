package dnsproxy

import "github.com/nametap/nametap/dnsproxy/wire"

// A table has shardCount shards, enough for a push that changes one host of 100,000
// to build 400 anew.
const (
	shardBits  = 8
	shardCount = 1 << shardBits
)

// shardOf returns the shard of a hash.
func shardOf(hash uint64) int { return int(hash >> (64 - shardBits)) } //nolint:gosec // eight bits

// A digest tells whether the entries of a shard are those of another push, in
// whatever order. Two sets that differ have the same digest with a probability of
// 2^-64.
type digest struct {
	sum     uint64 // of the entries' hashes
	entries int
}

// A shard holds the hosts whose names hash to it. It never changes; the zero value is
// empty.
type shard struct {
	digest  digest
	records []byte
	// index has the offsets of records, plus one, where the hash of their names puts
	// them: open addressing in a power of two that is never full. Empty without
	// records.
	index            []uint32
	hosts, wildcards int

	// What is rare: entries that no table can hold, names that two entries claim,
	// and names that cannot be derived from a host's FQDN.
	skipped    []Skipped
	collisions []Collision
	claims     []claim
}

// A claim is a name that a host wants to be known by beside its FQDN.
type claim struct {
	name wire.Name
	fqdn wire.Name
	key  string // the host's
}

// find returns the host of a name, which hashes to hash.
func (s *shard) find(hash uint64, name wire.Name) (h host, ok bool) {
	if len(s.index) == 0 {
		return host{}, false
	}
	mask := uint64(len(s.index) - 1)
	for i := hash & mask; s.index[i] != 0; i = (i + 1) & mask {
		record := s.records[s.index[i]-1:]
		if int(record[1]) == len(name) && string(record[recordNameOffset:][:len(name)]) == string(name) {
			return viewHost(record), true
		}
	}
	return host{}, false
}

// all yields the hosts, in the order of their names.
func (s *shard) all(yield func(host) bool) {
	for rest := s.records; len(rest) > 0; {
		h := viewHost(rest)
		if !yield(h) {
			return
		}
		rest = rest[recordLen(rest):]
	}
}
