package table

import (
	"cmp"
	"hash/maphash"
	"sort"
	"strings"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A hostSet is the hosts of a table, without the indexes that are made from them. It is immutable.
type hostSet struct {
	Cluster Cluster
	seed    maphash.Seed // the same in the previous and the next tables
	shards  [digest.Count]shard
	counts
}

// all yields the hosts, including wildcards.
func (s *hostSet) all(yield func(Host) bool) {
	for i := range s.shards {
		for h := range s.shards[i].all {
			if !yield(h) {
				return
			}
		}
	}
}

// find returns the host with this name.
func (s *hostSet) find(name wire.Name) (Host, bool) {
	at := &s.shards[digest.ShardOfWire(string(name))]
	if len(at.index) == 0 {
		return Host{}, false
	}
	return at.find(maphash.String(s.seed, string(name)), name)
}

// partCount is the number of parts of reverseIndex and ancestors. These two are not divided into shards, because a
// shard is chosen by the name of a host, but their keys are addresses and ancestors.
const (
	partBits  = 8
	partCount = 1 << partBits
)

// partOf returns the part of a hash.
func partOf(hash uint64) int { return int(hash >> (64 - partBits)) } //nolint:gosec // eight bits

// A shard holds the hosts for which [digest.ShardOf] returns its number. If there are 100,000 hosts, it holds some
// 400 of them, and a push that changes one host builds one shard. A shard is immutable. The zero value is empty.
type shard struct {
	content content
	records []byte
	// index is a hash table with open addressing. The hash of a name leads to a slot with the offset of the record plus
	// one. A free slot has 0. The length of index is a power of two, and there is always a free slot. If there are no
	// records, index is nil.
	index []uint32
	counts

	skipped    []Skipped   // entries, or parts of entries, that are not valid
	collisions []Collision // names that two entries claim
}

// find returns the host with a name. hash is the hash of the name.
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

// hostsWith calls yield for the hosts that have a packed address. The low half of the hash of the host's name must also
// be nameHash. If yield returns false, hostsWith ends and returns false, too.
func (s *shard) hostsWith(packed []byte, seed maphash.Seed, nameHash uint32, yield func(Host) bool) bool {
	if len(s.index) == 0 {
		return true
	}
	mask := uint32(len(s.index) - 1) //nolint:gosec // a shard is shorter
	for i := nameHash & mask; s.index[i] != 0; i = (i + 1) & mask {
		h := viewHost(s.records[s.index[i]-1:])
		if uint32(maphash.String(seed, string(h.Name))) == nameHash && h.has(packed) && !yield(h) { //nolint:gosec // the low half
			return false
		}
	}
	return true
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

func (s *shard) skip(key, reason string) {
	s.skipped = append(s.skipped, Skipped{Key: strings.ToValidUTF8(strings.Clone(key), "\uFFFD"), Reason: reason})
}

// newIndex returns an index for n records.
func newIndex(n int) []uint32 {
	if n == 0 {
		return nil
	}
	size := 1
	for size*3 < n*4 { // at most three quarters of the slots are used
		size *= 2
	}
	return make([]uint32, max(size, 2))
}

// add adds a host. Its name must not be in the shard yet, and the index must have a free slot.
func (s *shard) add(hash uint64, c *candidate, cl *Cluster) {
	mask := uint64(len(s.index) - 1)
	i := hash & mask
	for s.index[i] != 0 {
		i = (i + 1) & mask
	}
	s.index[i] = uint32(len(s.records)) + 1 //nolint:gosec // a push is below 4 GiB
	s.records = c.appendRecord(s.records)
	if c.wildcard() {
		s.wildcards++
		if cl.zone(c.Name) != wire.Root {
			s.zoned++
		}
	} else {
		s.hosts++
	}
	if c.derived() {
		var heads [3]wire.Name
		for _, name := range cl.heads(c.Name, heads[:0]) {
			s.tails.add(name)
		}
	}
	if c.headless() {
		s.headless++
	}
	if len(c.ports) > 0 && c.Kubernetes() {
		s.ported++
	}
}

// A content is a hash of the entries of a shard. It does not depend on their order. Two different sets of entries
// have the same content with a probability of 2^-64.
type content struct {
	sum     uint64 // the sum of the entries' hashes
	entries int
}

// add adds an entry in wire form.
func (c *content) add(seed maphash.Seed, raw []byte) {
	c.entries++
	c.sum += maphash.Bytes(seed, raw)
}

// counts are numbers of hosts.
type counts struct {
	hosts, wildcards uint32 // hosts does not include wildcards
	zoned            uint32 // how many of the wildcards are in the zones of the cluster
	headless, ported uint32 // how many of them are headless Services, and how many are Services with ports
	tails            tails  // of the short names that are derived from FQDNs
}

func (c *counts) addCounts(other *counts) {
	c.hosts += other.hosts
	c.wildcards += other.wildcards
	c.headless += other.headless
	c.ported += other.ported
	c.zoned += other.zoned
	for i := range c.tails {
		c.tails[i] |= other.tails[i]
	}
}

// tails tells most names of the world from short names, by a hash of their last labels: those of short names are
// namespaces, svc, and Services of the agent's namespace.
type tails [16]uint64

func (t *tails) add(name wire.Name) {
	word, bit := tailOf(name)
	t[word] |= bit
}

// mayHave reports whether a name that was added may have the last label of name.
func (t *tails) mayHave(name wire.Name) bool {
	word, bit := tailOf(name)
	return t[word]&bit != 0
}

func tailOf(name wire.Name) (word int, bit uint64) {
	for len(name) > 1+int(name[0]) {
		name = name.Parent()
	}
	hash := uint32(0)
	for i := range len(name) {
		hash = (hash + uint32(name[i])) * 0x9e3779b1 // 2^32 divided by the golden ratio
	}
	return int(hash >> 28), 1 << (hash >> 22 & 63)
}

// A Skipped is an entry that was left out of the table, or an entry of which a part was left out, with the reason.
type Skipped struct {
	Key    string `json:"key"`
	Reason string `json:"reason"`
}

func sortSkipped(all []Skipped) {
	sort.Slice(all, func(i, j int) bool {
		return cmp.Or(cmp.Compare(all[i].Key, all[j].Key), cmp.Compare(all[i].Reason, all[j].Reason)) < 0
	})
}

// A Collision is a name that two entries of a push claim. If a host is below the wildcard of
// another entry, this is not a collision: the exact name wins by design.
type Collision struct {
	Name   string `json:"name"`
	Winner string `json:"winner"`
	Loser  string `json:"loser"`
}
