package fleet

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/nametap/nametap/api/digest"

	"github.com/nametap/nametap/bench/agents/wire"
)

// A table has the checksum of each entry of a name table. It never changes; tables share the shards
// in which they are equal.
type table struct {
	shards  [digest.Count][]entry // sorted by host
	sums    digest.Sums
	sum     digest.Sum
	hosts   int
	digests func() string // returns the digests for the metadata of the node, which are computed once
}

// An entry is an entry of a table.
type entry struct {
	host string
	sum  digest.Sum
}

// newTable returns a table without hosts.
func newTable() *table { return new(table).finish() }

// finish computes what follows from the shards and their sums.
func (t *table) finish() *table {
	t.sum, t.hosts = t.sums.Sum(), 0
	for _, shard := range t.shards {
		t.hosts += len(shard)
	}
	t.digests = sync.OnceValue(func() string { return base64.StdEncoding.EncodeToString(t.sums.Digests().Bytes()) })
	return t
}

// apply returns the table after a change, whose new entries are in raw, a NameTable. It returns an
// error if the table's checksum is not the checksum in the change.
func (t *table) apply(raw []byte, c wire.Change) (*table, error) {
	var added [digest.Count][]entry
	removed := map[int][]string{}
	err := wire.Entries(raw, func(host string, raw []byte) {
		b := digest.ShardOf(host)
		added[b] = append(added[b], entry{host, digest.Of(raw)})
	})
	if err != nil {
		return nil, err
	}
	for _, host := range c.Removed {
		b := digest.ShardOf(host)
		removed[b] = append(removed[b], host)
	}
	next := &table{shards: t.shards, sums: t.sums}
	for b := range digest.Count {
		old := t.shards[b]
		if c.Complete.Has(b) {
			old = nil
		} else if added[b] == nil && removed[b] == nil {
			continue
		}
		next.shards[b] = merge(old, added[b], removed[b])
		next.sums[b] = sumOf(next.shards[b])
	}
	if next.finish(); next.sum != c.Sum {
		return nil, fmt.Errorf("the checksum of %d hosts is %v: want %v, after a change of %d bytes", next.hosts, next.sum, c.Sum, len(raw))
	}
	return next, nil
}

// merge returns the shard old, without the entries of the hosts removed and with the entries added. It sorts added.
func merge(old, added []entry, removed []string) []entry {
	slices.SortStableFunc(added, func(a, b entry) int { return strings.Compare(a.host, b.host) })
	out := make([]entry, 0, len(old)+len(added))
	for _, e := range old {
		for len(added) > 0 && added[0].host < e.host {
			out, added = append(out, added[0]), added[1:]
		}
		if len(added) > 0 && added[0].host == e.host {
			e.sum, added = added[0].sum, added[1:]
		} else if slices.Contains(removed, e.host) {
			continue
		}
		out = append(out, e)
	}
	return append(out, added...)
}

// sumOf returns the checksum of a shard.
func sumOf(shard []entry) (sum digest.Sum) {
	for _, e := range shard {
		sum = sum.Add(e.sum)
	}
	return sum
}

// maxTables bounds the tables that are kept for agents that reach them later.
const maxTables = 2048

// tables are the tables of all agents, by their checksums. Agents that have the same table share it:
// only the first of them applies the change that leads to it.
type tables struct {
	mu    sync.RWMutex
	bySum map[digest.Sum]*table
	order []digest.Sum // in which they came
}

func newTables() *tables { return &tables{bySum: map[digest.Sum]*table{}} }

// get returns a table, or nil.
func (t *tables) get(sum digest.Sum) *table {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.bySum[sum]
}

// add adds a table. If there is one with its checksum already, add returns that.
func (t *tables) add(next *table) *table {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known := t.bySum[next.sum]; known != nil {
		return known
	}
	if len(t.order) == maxTables {
		delete(t.bySum, t.order[0])
		t.order = t.order[1:]
	}
	t.bySum[next.sum] = next
	t.order = append(t.order, next.sum)
	return next
}
