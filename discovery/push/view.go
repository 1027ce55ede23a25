package push

import (
	"time"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// A generation is the number of a state of all hosts. Each update that changes hosts begins the next generation.
type generation uint64

// An identity identifies the table of a base or a view. Each base and each view has its own. A checksum cannot identify
// a table, because the author of hosts can make different tables with the same checksum.
type identity struct{ _ byte }

// A base has the checksums of the table that several views have in common. It is guarded by tables.mu, except for its
// viewer.
type base struct {
	id      *identity
	viewer  hosts.Viewer
	sums    digest.Sums
	total   digest.Sum // of sums
	entries int
	changed [digest.Count]generation // the last generation in which the shard has changed
	last    generation               // the latest of changed
	views   map[string]*view         // by namespace
}

// newBase returns the base of a viewer. The parameter all has all hosts, by shard.
func newBase(viewer hosts.Viewer, all [digest.Count][]*hosts.Host) *base {
	b := &base{id: new(identity), viewer: viewer, views: map[string]*view{}}
	for i, some := range all {
		for _, h := range some {
			if e := viewer.Entry(h); e != nil {
				b.sums[i], b.entries = b.sums[i].Add(e.Sum), b.entries+1
			}
		}
	}
	b.total = b.sums.Sum()
	return b
}

// shifts returns how changes of hosts change the base.
func (b *base) shifts(changes []hosts.HostChange) (all []shift) {
	for _, c := range changes {
		if old, updated := b.viewer.Entry(c.Old), b.viewer.Entry(c.New); differ(old, updated) {
			all = append(all, shiftOf(c.Key(), old, updated))
		}
	}
	return all
}

// apply applies the shifts of an update, which begins the generation g.
func (b *base) apply(shifts []shift, g generation) {
	for _, s := range shifts {
		b.sums[s.shard], b.total = b.sums[s.shard].Add(s.sum), b.total.Add(s.sum)
		b.entries += s.entries
		b.changed[s.shard], b.last = g, g
	}
}

// A shift says how a shard changes: what is added to its checksum, and to the number of its entries.
type shift struct {
	shard   int
	sum     digest.Sum
	entries int
}

// hosts returns 1 if the shift changes anything, and 0 if it does not. The shift must be the shift of a single host.
func (s shift) hosts() int {
	if s == (shift{}) {
		return 0
	}
	return 1
}

// shiftOf returns how a table changes if an updated entry replaces the old entry of a host; nil stands for no entry.
func shiftOf(key string, old, updated *hosts.Entry) shift {
	s := shift{shard: digest.ShardOf(key)}
	if old != nil {
		s.sum, s.entries = s.sum.Sub(old.Sum), s.entries-1
	}
	if updated != nil {
		s.sum, s.entries = s.sum.Add(updated.Sum), s.entries+1
	}
	return s
}

// differ reports whether two entries differ; nil stands for no entry.
func differ(a, b *hosts.Entry) bool {
	return a != b && (a == nil || b == nil || a.Sum != b.Sum)
}

// A view has what the clients with the same base and namespace see: the base, except for the hosts that this
// namespace sees in another way. It is guarded by tables.mu.
type view struct {
	id      *identity
	base    *base
	viewer  hosts.Viewer
	differs map[int]difference // by shard
	sumDiff digest.Sum         // sum of the checksums in differs
	hosts   int                // number of hosts in differs
	entries int                // number of entries in the table, minus those of the base
	last    generation         // latest generation in differs
	// textOf is a checksum that the table has had, and text is this checksum as text.
	text      string
	textOf    digest.Sum
	sessions  map[*session]struct{}
	dropTimer *time.Timer // drops the view; nil while it has sessions
}

// A difference says how a shard of a view differs from that of its base. The field sum is the checksum in the view
// minus the checksum in the base, hosts is the number of hosts that differ, and changed is the generation in which the
// difference last changed.
type difference struct {
	sum     digest.Sum
	hosts   int
	changed generation
}

// newView returns the view of a viewer, without sessions.
func newView(b *base, viewer hosts.Viewer, set *hosts.Set, g generation) *view {
	v := &view{id: new(identity), base: b, viewer: viewer, differs: map[int]difference{}, sessions: map[*session]struct{}{}}
	for h := range set.Special(&viewer) {
		v.apply(hosts.HostChange{New: h}, g)
	}
	return v
}

// apply applies a change of a host that the view may see in another way than the base. It reports whether the entry of
// the host in the view has changed.
func (v *view) apply(c hosts.HostChange, g generation) bool {
	key := c.Key()
	was, is := v.difference(c.Old), v.difference(c.New)
	if was != is {
		sum, count := is.sum.Sub(was.sum), is.hosts()-was.hosts()
		shard := digest.ShardOf(key)
		v.differs[shard] = difference{v.differs[shard].sum.Add(sum), v.differs[shard].hosts + count, g}
		v.sumDiff, v.hosts, v.entries, v.last = v.sumDiff.Add(sum), v.hosts+count, v.entries+is.entries-was.entries, g
	}
	return differ(v.viewer.Entry(c.Old), v.viewer.Entry(c.New))
}

// difference returns the shift from the entry of a host in the base to its entry in the view.
func (v *view) difference(h *hosts.Host) shift {
	if h == nil {
		return shift{}
	}
	s := shiftOf(h.Key, v.base.viewer.Entry(h), v.viewer.Entry(h))
	s.shard = 0 // equal entries then give the zero shift
	return s
}

// A shardID identifies the entries of a shard in the table of a base or a view, by the generation in which these
// entries last changed.
type shardID struct {
	table   *identity
	shard   int
	changed generation
}

// A resourceID identifies a resource by its content. A resource is the whole table of a base or a view, or a change of
// such a table.
type resourceID struct {
	change bool // whether the resource is a change
	table  *identity

	// The fields below are 0 if the resource is not a change.

	wholeShards  digest.Set // the shards of which the change has all entries
	changesSince generation // the generation after which changes of other shards are in the change; 0 if none are
}

// shardID returns the ID of the entries of a shard.
func (v *view) shardID(i int) shardID {
	id := shardID{v.base.id, i, v.base.changed[i]}
	if d := v.differs[i]; d.hosts > 0 {
		id.table, id.changed = v.id, max(id.changed, d.changed)
	}
	return id
}

// tableID returns the identity of the table. A view that is equal to its base has the identity of the base.
func (v *view) tableID() *identity {
	if v.hosts > 0 {
		return v.id
	}
	return v.base.id
}

// isOwn reports whether only some namespaces share the table, because of a Sidecar or an exportTo.
func (v *view) isOwn() bool { return v.hosts > 0 || v.base.viewer.Sidecar != (hosts.Limit{}) }

// shard returns the checksum of a shard.
func (v *view) shard(i int) digest.Sum { return v.base.sums[i].Add(v.differs[i].sum) }

// sum returns the checksum of the table.
func (v *view) sum() digest.Sum { return v.base.total.Add(v.sumDiff) }

// version returns the checksum of the table as text.
func (v *view) version() string {
	if sum := v.sum(); v.text == "" || v.textOf != sum {
		v.text, v.textOf = sum.String(), sum
	}
	return v.text
}

// changedAt returns the last generation in which the table has changed.
func (v *view) changedAt() generation { return max(v.base.last, v.last) }

// changedSince returns the shards that have changed after a generation.
func (v *view) changedSince(g generation) (s digest.Set) {
	if v.changedAt() <= g {
		return s
	}
	for i, last := range v.base.changed {
		if last > g {
			s.Add(i)
		}
	}
	for i, d := range v.differs {
		if d.changed > g {
			s.Add(i)
		}
	}
	return s
}

// differsFrom returns the shards in which v and other differ.
func (v *view) differsFrom(other *view) (s digest.Set) {
	for i := range digest.Count {
		if v.shard(i) != other.shard(i) {
			s.Add(i)
		}
	}
	return s
}

// differing returns the shards in which a client with these digests has other hosts than v.
func (v *view) differing(client *digest.Digests) digest.Set {
	served := v.digests()
	return served.Differing(client)
}

// digests returns the digests of the table.
func (v *view) digests() (d digest.Digests) {
	for i := range d {
		d[i] = v.shard(i).Prefix()
	}
	return d
}
