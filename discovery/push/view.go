package push

import (
	"slices"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// viewKey is everything that determines what a client is sent. Clients with the same key
// share a view.
type viewKey struct {
	hosts.View
	merge bool // the client merges several tables
}

// view says which tables the clients with one key have: a single one without a name, or one per
// namespace for a client that merges tables. A host is in one table only, that of the first namespace, in
// alphabetical order, that gives it an address. It is guarded by tables.mu.
type view struct {
	key    viewKey
	viewer hosts.Viewer
	tables map[string]table // by resource name
	// For clients that merge hosts: the checksums of the unnamed table's buckets, and the last changes.
	buckets digest.Buckets
	history history
	// sessions are those of the clients with this view.
	sessions map[*session]struct{}
}

// table is what is known of a table that may not be encoded yet.
type table struct {
	sum     digest.Sum
	entries int
	version string // the sum as text
}

// newView returns the view of a key. Its history is what it sees of past, so that a client of another replica
// can resume here although it is the first one with this view.
func newView(all *hosts.Hosts, key viewKey, past []step) *view {
	v := &view{key: key, viewer: all.Viewer(key.View), tables: map[string]table{}, sessions: map[*session]struct{}{}}
	changed := map[string]bool{}
	if !key.merge {
		changed[""] = true
	}
	for host := range all.All() {
		v.apply(hosts.HostChange{New: host}, changed)
	}
	v.settle(changed)
	if !key.merge {
		v.recall(past)
	}
	return v
}

// recall makes the history of a view that has none, from changes of hosts that lead to now.
func (v *view) recall(past []step) {
	then, sum := v.buckets, v.tables[""].sum
	for _, all := range slices.Backward(past) {
		var s step
		for _, c := range slices.Backward(all.changes) {
			changed := difference(v.viewer.Entry(c.Old), v.viewer.Entry(c.New))
			if changed == (digest.Sum{}) {
				continue
			}
			bucket := digest.BucketOf(c.Key())
			then[bucket], sum = then[bucket].Sub(changed), sum.Sub(changed)
			s.changes, s.undo = append(s.changes, c), append(s.undo, undo{uint8(bucket), then[bucket].Prefix()})
		}
		if s.sum = sum; len(s.changes) > 0 {
			slices.Reverse(s.changes)
			slices.Reverse(s.undo)
			v.history.steps = append(v.history.steps, s)
			v.history.size += len(s.changes)
		}
	}
	slices.Reverse(v.history.steps)
	v.history.now = generation(len(v.history.steps))
}

// difference returns by how much the checksum of a table changes with an entry; nil stands for none.
func difference(old, now *hosts.Entry) (sum digest.Sum) {
	if old != nil {
		sum = sum.Sub(old.Sum)
	}
	if now != nil {
		sum = sum.Add(now.Sum)
	}
	return sum
}

// update takes over changed hosts. It returns the tables that the view had and has not any more.
func (v *view) update(changes []hosts.HostChange) (replaced []resourceID) {
	changed := map[string]bool{}
	s := step{sum: v.tables[""].sum}
	for _, c := range changes {
		bucket := digest.BucketOf(c.Key())
		before := v.buckets[bucket].Prefix()
		if v.apply(c, changed) {
			s.changes, s.undo = append(s.changes, c), append(s.undo, undo{uint8(bucket), before})
		}
	}
	for name := range changed {
		replaced = append(replaced, resourceID{name, v.tables[name].version})
	}
	v.settle(changed)
	if len(s.changes) > 0 && !v.key.merge {
		v.history.add(s)
	}
	return replaced
}

// apply takes over a changed host, and notes which tables have changed. It reports whether any has.
func (v *view) apply(c hosts.HostChange, changed map[string]bool) bool {
	old, now := v.viewer.Entry(c.Old), v.viewer.Entry(c.New)
	if old == now || old != nil && now != nil && old.Sum == now.Sum && old.Namespace == now.Namespace {
		return false
	}
	if old != nil {
		changed[v.count(old, -1, difference(old, nil))] = true
	}
	if now != nil {
		changed[v.count(now, 1, difference(nil, now))] = true
	}
	if !v.key.merge {
		bucket := &v.buckets[digest.BucketOf(c.Key())]
		*bucket = bucket.Add(difference(old, now))
	}
	return true
}

// count adds to the entries and to the checksum of the table with an entry, and returns its name.
func (v *view) count(e *hosts.Entry, entries int, sum digest.Sum) (name string) {
	name = v.tableOf(e)
	t := v.tables[name]
	t.sum, t.entries = t.sum.Add(sum), t.entries+entries
	v.tables[name] = t
	return name
}

// settle gives changed tables their version, and removes those without an entry. The unnamed one
// stays, because a client that has hosts would keep them.
func (v *view) settle(changed map[string]bool) {
	for name := range changed {
		t := v.tables[name]
		if t.entries == 0 && v.key.merge {
			delete(v.tables, name)
			continue
		}
		t.version = t.sum.String()
		v.tables[name] = t
	}
}

// has reports whether the view has a table with this content.
func (v *view) has(id resourceID) bool {
	t, ok := v.tables[id.name]
	return ok && t.version == id.version
}

// tableOf returns the name of the table with an entry.
func (v *view) tableOf(e *hosts.Entry) string {
	if v.key.merge {
		return e.Namespace
	}
	return ""
}

// version returns the version of all tables together.
func (v *view) version() string {
	if !v.key.merge {
		return v.tables[""].version
	}
	var all digest.Sum
	for _, t := range v.tables {
		all = all.Add(t.sum)
	}
	return all.String()
}

// encode returns the encoded table with a name.
func (v *view) encode(all *hosts.Hosts, name string) *resource {
	some := all.All()
	if v.key.merge {
		some = all.Of(name)
	}
	entries := make([]*hosts.Entry, 0, v.tables[name].entries)
	for host := range some {
		if e := v.viewer.Entry(host); e != nil && v.tableOf(e) == name {
			entries = append(entries, e)
		}
	}
	return newResource(name, v.tables[name].version, concatenate(entries, 0))
}

// Encode returns the encoded tables, by resource name, of clients with a view. merge says that they merge
// tables.
func Encode(all *hosts.Hosts, of hosts.View, merge bool) map[string][]byte {
	v := newView(all, viewKey{of, merge}, nil)
	encoded := make(map[string][]byte, len(v.tables))
	for name := range v.tables {
		encoded[name] = v.encode(all, name).table
	}
	return encoded
}
