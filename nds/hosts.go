package nds

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// A HostTable puts single hosts to use. Its methods are called from the goroutine that calls the
// apply function, never concurrently.
type HostTable interface {
	// ShardOf returns the shard of a host, by its key in any case. It is not negative and
	// stays the same as long as the process runs.
	ShardOf(host string) int
	// ApplyShards replaces shards of the table. shards has all entries of each shard, a NameTable
	// in wire form. With whole, all other shards become empty, and what is in use is not used again. An
	// error rejects the push: all shards stay in use as they are. It may keep the entries, and must
	// not change them.
	ApplyShards(shards map[int][]byte, whole bool) error
	// Damaged reports whether a shard of the table in use has changed in memory since ApplyShards.
	Damaged(shard int) bool
}

// hostTable has the entries of a table that came as changes, by the shards of the [HostTable], so that
// a change costs as much as the shards that it changes. It is immutable: the next one shares the shards
// that are unchanged. The zero value has no hosts.
//
// Checksums are kept for each shard and for each bucket. An entry is hashed when it comes, when
// its shard is rewritten, and when the client connects, so a bit that has changed in memory
// is found, and does not reach the checksum of the table.
type hostTable struct {
	shards   []hostShard // by number
	buckets  digest.Buckets
	revision []byte
	// turn is the shard that the next change checks, besides those that it changes.
	turn int
}

// A hostShard has the entries of a shard, a NameTable in wire form.
type hostShard struct {
	entries []byte
	sum     digest.Sum
	hosts   int
}

// A differenceError says that entries do not have the checksum that they should have.
type differenceError struct{ text string }

func (e *differenceError) Error() string { return e.text }

// differs reports whether err is a differenceError.
func differs(err error) bool {
	var difference *differenceError
	return errors.As(err, &difference)
}

// len returns the number of hosts.
func (t *hostTable) len() int {
	n := 0
	for i := range t.shards {
		n += t.shards[i].hosts
	}
	return n
}

// with returns the table after a change, and the entries of the shards that differ.
func (t *hostTable) with(c *change, shardOf func(string) int) (next *hostTable, changed map[int][]byte, err error) {
	next = &hostTable{shards: slices.Clone(t.shards), buckets: t.buckets, revision: slices.Clone(c.revision)}
	added := map[int][]hostEntry{}
	for host, raw := range c.hosts {
		at := shardOf(host)
		list := added[at]
		if raw != nil {
			list = append(list, hostEntry{bucket: digest.BucketOf(host), raw: raw})
		}
		added[at] = list
		if at >= len(next.shards) {
			next.shards = append(next.shards, make([]hostShard, at+1-len(next.shards))...)
		}
	}
	if c.complete != (digest.Set{}) {
		for at := range next.shards {
			if _, there := added[at]; !there {
				added[at] = nil // any host may be removed
			}
		}
	}
	changed = map[int][]byte{}
	for at, entries := range added {
		s, err := next.rewritten(at, c, entries)
		if err != nil {
			return nil, nil, t.difference(c)
		}
		if s.sum != next.shards[at].sum {
			next.shards[at], changed[at] = s, s.entries
		}
	}
	if len(t.shards) > 0 {
		next.turn = (t.turn + 1) % len(t.shards)
		if !t.shards[t.turn].intact() {
			return nil, nil, t.difference(c)
		}
	}
	if next.buckets.Sum() != c.sum {
		return nil, nil, t.difference(c)
	}
	return next, changed, nil
}

// all returns the entries of all shards.
func (t *hostTable) all() map[int][]byte {
	shards := map[int][]byte{}
	for at := range t.shards {
		shards[at] = t.shards[at].entries
	}
	return shards
}

// A hostEntry is an entry in wire form, with tag and length, and the bucket of its host.
type hostEntry struct {
	bucket int
	raw    []byte
}

// errDamaged says that the entries of a shard are not those that came.
var errDamaged = errors.New("entries have changed in memory")

// rewritten returns a shard after a change that adds entries to it, and updates the checksums of the
// buckets. It fails if the shard does not have its checksum.
func (t *hostTable) rewritten(at int, c *change, added []hostEntry) (hostShard, error) {
	var after hostShard
	var before digest.Sum
	var kept [][]byte // runs of entries that stay
	size, start := 0, 0
	old := t.shards[at].entries
	cut := func(end int) {
		if start < end {
			kept = append(kept, old[start:end])
			size += end - start
		}
	}
	var buffer [maxHostLen]byte
	for offset := 0; offset < len(old); {
		key, n, err := cutEntry(old[offset:])
		if err != nil {
			return hostShard{}, errDamaged
		}
		sum := digest.Of(old[offset:][:n])
		before = before.Add(sum)
		host := appendLower(buffer[:0], key)
		bucket := digest.BucketOf(host)
		if _, replaced := c.hosts[string(host)]; replaced || c.complete.Has(bucket) {
			cut(offset)
			start = offset + n
			t.buckets[bucket] = t.buckets[bucket].Sub(sum)
		} else {
			after.sum, after.hosts = after.sum.Add(sum), after.hosts+1
		}
		offset += n
	}
	if before != t.shards[at].sum {
		return hostShard{}, errDamaged
	}
	cut(len(old))
	for _, entry := range added {
		sum := digest.Of(entry.raw)
		t.buckets[entry.bucket] = t.buckets[entry.bucket].Add(sum)
		after.sum, after.hosts = after.sum.Add(sum), after.hosts+1
		kept = append(kept, entry.raw)
		size += len(entry.raw)
	}
	if after.sum == before {
		return t.shards[at], nil // the same entries in another order
	}
	after.entries = make([]byte, 0, size)
	for _, run := range kept {
		after.entries = append(after.entries, run...)
	}
	return after, nil
}

// maxHostLen is the length of most keys at most.
const maxHostLen = 256

// intact reports whether the entries of a shard have its checksum.
func (s *hostShard) intact() bool {
	var sum digest.Sum
	err := s.each(func(_ []byte, entry digest.Sum) { sum = sum.Add(entry) })
	return err == nil && sum == s.sum
}

// each calls yield with the host, in lower case, and the checksum of each entry.
func (s *hostShard) each(yield func(host []byte, sum digest.Sum)) error {
	var buffer [maxHostLen]byte
	for rest := s.entries; len(rest) > 0; {
		key, n, err := cutEntry(rest)
		if err != nil {
			return err
		}
		yield(appendLower(buffer[:0], key), digest.Of(rest[:n]))
		rest = rest[n:]
	}
	return nil
}

// checked returns the table with the checksums that its entries have. If they differ from those in t,
// damage names the hosts and buckets, and actual has no revision. Entries that cannot be parsed are left
// out, so that the control plane sends them again.
func (t *hostTable) checked() (actual *hostTable, damage string) {
	actual = &hostTable{shards: slices.Clone(t.shards), revision: t.revision, turn: t.turn}
	var bad []int
	for at := range actual.shards {
		s := &actual.shards[at]
		s.sum, s.hosts = digest.Sum{}, 0
		var buckets digest.Buckets
		err := s.each(func(host []byte, sum digest.Sum) {
			s.sum, s.hosts = s.sum.Add(sum), s.hosts+1
			bucket := digest.BucketOf(host)
			buckets[bucket] = buckets[bucket].Add(sum)
		})
		if err != nil {
			*s = hostShard{}
		} else {
			actual.addBuckets(&buckets)
		}
		if s.sum != t.shards[at].sum {
			bad = append(bad, at)
		}
	}
	differing := t.buckets.Differing(&actual.buckets)
	if len(bad) == 0 && differing == (digest.Set{}) {
		return actual, ""
	}
	actual.revision = nil // it is not the table of that revision
	var hosts, buckets []string
	for _, at := range bad {
		_ = t.shards[at].each(func(host []byte, _ digest.Sum) { // as far as they can be parsed
			if differing.Has(digest.BucketOf(host)) {
				hosts = append(hosts, string(host))
			}
		})
	}
	for bucket := range digest.Count {
		if differing.Has(bucket) {
			buckets = append(buckets, strconv.Itoa(bucket))
		}
	}
	return actual, "entries have changed in memory: of " + someOf("host", hosts) + ", in " + someOf("bucket", buckets)
}

func (t *hostTable) addBuckets(more *digest.Buckets) {
	for i, sum := range more {
		t.buckets[i] = t.buckets[i].Add(sum)
	}
}

// difference returns the error for a change after which the table has not the checksum that it should
// have.
func (t *hostTable) difference(c *change) error {
	if _, damage := t.checked(); damage != "" {
		return &differenceError{damage}
	}
	hosts := make([]string, 0, len(c.hosts))
	for host := range c.hosts {
		hosts = append(hosts, host)
	}
	slices.Sort(hosts)
	return &differenceError{fmt.Sprintf("with this change the table does not have the checksum %s: it changes %s", c.sum, someOf("host", hosts))}
}

// someOf lists names, or the first ones of many.
func someOf(what string, names []string) string {
	const most = 5
	switch {
	case len(names) == 0:
		return "an unknown " + what
	case len(names) > most:
		return fmt.Sprintf("%ss %s and %d more", what, strings.Join(names[:most], ", "), len(names)-most)
	case len(names) > 1:
		return what + "s " + strings.Join(names, ", ")
	}
	return what + " " + names[0]
}

// marshal returns the parts of the table as a change from the empty one: a NameTable in wire form.
func (t *hostTable) marshal() ([][]byte, error) {
	complete := digest.All()
	end, err := marshalChange(&api.NameTable_Change{Complete: complete[:], Sum: t.buckets.Sum().Bytes(), Revision: t.revision})
	parts := make([][]byte, 0, len(t.shards)+1)
	for i := range t.shards {
		parts = append(parts, t.shards[i].entries)
	}
	return append(parts, end), err
}
