package nds

import (
	"bytes"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// A hostTable has the entries of a table, by shard. It is immutable. The next table is a new hostTable that shares
// all unchanged shards, so the cost of a change depends only on the shards that it changes.
type hostTable struct {
	mode   Mode
	shards [digest.Count]hostShard
	// The checksums of the shards, and the revision of the last change (api/nds.proto); only in ModeHosts.
	sums     digest.Sums
	revision []byte
}

// A hostShard has the entries of a shard, as a NameTable in wire form, and their number.
type hostShard struct {
	entries []byte
	hosts   int
}

// wholeTable returns the hostTable for table, a NameTable in wire form without a Change. The hostTable has a copy of
// the entries.
func wholeTable(table []byte) (*hostTable, error) {
	shards, err := digest.Split(table)
	if err != nil {
		return nil, err
	}
	t := &hostTable{mode: ModeWhole}
	for shard, entries := range shards {
		t.shards[shard].entries = entries
		for rest := entries; len(rest) > 0; t.shards[shard].hosts++ {
			_, _, n := protowire.ConsumeField(rest) // no error: Split has parsed it
			rest = rest[n:]
		}
	}
	return t, nil
}

// digest returns the checksum of the table in the form of Status.Digest, or "" if the table came whole. t may be
// nil.
func (t *hostTable) digest() string {
	if t == nil || t.mode != ModeHosts {
		return ""
	}
	return t.sums.Sum().String()
}

// len returns the number of hosts.
func (t *hostTable) len() int {
	n := 0
	for i := range t.shards {
		n += t.shards[i].hosts
	}
	return n
}

// apply returns the table that results if c is applied to t. It does not change t, which may be nil.
func (t *hostTable) apply(c *change) (*hostTable, error) {
	next := &hostTable{mode: ModeHosts, revision: slices.Clone(c.revision)}
	if t != nil && t.mode == ModeHosts {
		next.shards, next.sums = t.shards, t.sums
	}
	var added [digest.Count][][]byte
	touched := c.complete
	for host, raw := range c.hosts {
		shard := digest.ShardOf(host)
		touched.Add(shard)
		if raw != nil {
			added[shard] = append(added[shard], raw)
		}
	}
	for shard := range next.shards {
		if touched.Has(shard) {
			next.rewrite(shard, c, added[shard])
		}
	}
	if next.sums.Sum() != c.sum {
		return nil, c.difference()
	}
	return next, nil
}

// rewrite applies c to one shard. added has the entries in c that belong to this shard. If the entries of the shard
// stay the same, the shard keeps its bytes. rewrite compares the entries and not their checksums, because the author of
// entries can choose entries with equal checksums.
func (t *hostTable) rewrite(shard int, c *change, added [][]byte) {
	var kept [][]byte // runs of entries that stay
	old, complete := t.shards[shard].entries, c.complete.Has(shard)
	result, sum := hostShard{}, t.sums[shard]
	if complete {
		sum = digest.Sum{}
	}
	size, start, offset, removed, unchanged := 0, 0, 0, 0, 0
	cut := func() {
		if start < offset {
			kept = append(kept, old[start:offset])
			size += offset - start
		}
	}
	_ = t.eachEntry(shard, func(host, entry []byte) { // no error: the entries were parsed before
		end := offset + len(entry)
		if newEntry, replaced := c.hosts[string(host)]; replaced || complete {
			cut()
			start, removed = end, removed+1
			if bytes.Equal(newEntry, entry) {
				unchanged++
			}
			if !complete {
				sum = sum.Sub(digest.Of(entry))
			}
		} else {
			result.hosts++
		}
		offset = end
	})
	offset = len(old)
	cut()
	for _, entry := range added {
		sum, result.hosts = sum.Add(digest.Of(entry)), result.hosts+1
		kept = append(kept, entry)
		size += len(entry)
	}
	if t.sums[shard] = sum; unchanged == removed && unchanged == len(added) {
		return
	}
	result.entries = make([]byte, 0, size)
	for _, run := range kept {
		result.entries = append(result.entries, run...)
	}
	t.shards[shard] = result
}

// eachEntry calls the function yield with the host, in lower case, and the bytes of each entry of a shard.
func (t *hostTable) eachEntry(shard int, yield func(host, entry []byte)) error {
	var buffer [maxHostLen]byte
	for rest := t.shards[shard].entries; len(rest) > 0; {
		key, n, err := cutEntry(rest)
		if err != nil {
			return err
		}
		yield(appendLower(buffer[:0], key), rest[:n])
		rest = rest[n:]
	}
	return nil
}

// maxHostLen is the size of a buffer that holds almost every key; append allocates for longer keys.
const maxHostLen = 256

// differingFrom returns the shards of t that may differ from the shards of previous. previous may be nil.
func (t *hostTable) differingFrom(previous *hostTable) map[int][]byte {
	changed := map[int][]byte{}
	for shard := range t.shards {
		switch entries := t.shards[shard].entries; {
		case previous == nil || previous.mode != t.mode:
		case t.mode == ModeHosts && shared(entries, previous.shards[shard].entries),
			t.mode == ModeWhole && string(entries) == string(previous.shards[shard].entries):
			continue
		}
		changed[shard] = t.shards[shard].entries
	}
	return changed
}

// shared reports whether a and b are the same memory.
func shared(a, b []byte) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// summed returns t with checksums that are computed again from the entries. It is called after a wrong checksum,
// because the checksums in t may be wrong.
func (t *hostTable) summed() *hostTable {
	actual := *t
	actual.sums = digest.Sums{}
	for shard := range actual.shards {
		err := actual.eachEntry(shard, func(_, entry []byte) { actual.sums[shard] = actual.sums[shard].Add(digest.Of(entry)) })
		if err != nil { // the control plane sends this shard again
			actual.shards[shard], actual.sums[shard] = hostShard{}, digest.Sum{}
		}
	}
	if actual.sums != t.sums {
		actual.revision = nil // t does not have the entries that came with this revision
	}
	return &actual
}

// marshal returns the table as the parts of a NameTable in wire form. In ModeHosts, the NameTable has one change,
// which makes the table out of an empty table.
func (t *hostTable) marshal() ([][]byte, error) {
	parts := make([][]byte, 0, len(t.shards)+1)
	for i := range t.shards {
		parts = append(parts, t.shards[i].entries)
	}
	if t.mode == ModeWhole {
		return parts, nil
	}
	complete := digest.All()
	end, err := marshalChange(&api.NameTable_Change{Complete: complete[:], Sum: t.sums.Sum().Bytes(), Revision: t.revision})
	return append(parts, end), err
}
