package push

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// A position is what a client that merges hosts has: a generation of its view, except the buckets in
// missing. It is guarded by tables.mu.
type position struct {
	at      generation
	missing *digest.Set // nil if none is missing
	// rejected says that the client has rejected what it was sent. It is sent its whole table, but not
	// before something has changed: it might reject that, too.
	rejected bool
}

// fieldChange is the number of NameTable.change.
const fieldChange = 1001

// changeID identifies a change by the checksums of the tables before and after it, and by the buckets
// that are sent completely. Views that change in the same way share the bytes.
type changeID struct {
	from, to digest.Sum
	complete digest.Set
}

// startLocked returns the position of a client that has hosts with the given digests, or nothing if these
// are nil.
func (v *view) startLocked(client *digest.Digests) position {
	if client == nil {
		return v.position(digest.All())
	}
	now := v.buckets.Digests()
	g, missing := v.history.find(&now, client)
	p := v.position(missing)
	p.at = g
	return p
}

// position returns the position of a client that has the table of now, except some buckets.
func (v *view) position(missing digest.Set) position {
	p := position{at: v.history.now}
	if missing != (digest.Set{}) {
		some := missing // only this copy is allocated
		p.missing = &some
	}
	return p
}

// movedLocked returns the position in a view of a client that had one in another view.
func (v *view) movedLocked(old *view, p position) position {
	if p.at != old.history.now || p.missing != nil {
		all := v.position(digest.All())
		all.rejected = p.rejected && p.at == old.history.now && v.version() == old.version()
		return all
	}
	return v.position(v.buckets.Differing(&old.buckets))
}

// nextChangeLocked returns what leads a client that merges hosts to the table of now. It returns nil if the
// client has that already, or has rejected it, unless the client has to be sent something.
func (t *tables) nextChangeLocked(s *session) *resource {
	v, p := s.view, s.position
	if p.rejected && p.at == v.history.now && !s.owed {
		return nil
	}
	now := v.tables[""].sum
	id := changeID{from: now, to: now}
	if p.missing != nil {
		id.complete = *p.missing
	}
	steps, known := v.history.since(p.at)
	if !known || p.rejected {
		id.complete = digest.All()
	}
	if id.complete == digest.All() {
		steps = step{}
	}
	if len(steps.changes) > 0 {
		id.from = steps.sum
	}
	s.position = v.position(digest.Set{})
	if !s.owed && id == (changeID{from: now, to: now}) {
		return nil
	}
	r := t.changes.encoded[id]
	if r == nil {
		r = t.encodeChangeLocked(v, id, steps.changes)
		t.changes.add(id, r)
	}
	return r
}

// changes holds encoded changes that lead to the table of now.
type changes struct {
	encoded map[changeID]*resource
	size    int // of their tables, in bytes
}

// maxChanges bounds the encoded changes that are kept, in bytes, unless one alone is larger. Clients say which
// buckets they have, so that there may be any number of changes.
const maxChanges = 64 << 20

// add adds a change. It drops others, in no order, if there are too many.
func (c *changes) add(id changeID, r *resource) {
	c.size += len(r.table)
	for other, old := range c.encoded {
		if c.size <= maxChanges {
			break
		}
		c.size -= len(old.table)
		delete(c.encoded, other)
	}
	c.encoded[id] = r
}

// clear drops all changes.
func (c *changes) clear() {
	clear(c.encoded)
	c.size = 0
}

// encodeChangeLocked encodes a change.
func (t *tables) encodeChangeLocked(v *view, id changeID, changed []hosts.HostChange) *resource {
	change := &api.NameTable_Change{Sum: id.to.Bytes(), Revision: t.revision}
	var entries []*hosts.Entry
	if id.complete != (digest.Set{}) {
		change.Complete = id.complete[:]
		entries = v.entriesIn(t.hosts, &id.complete)
	}
	for _, h := range changed {
		if id.complete.Has(digest.BucketOf(h.Key())) {
			continue
		}
		switch old, now := v.viewer.Entry(h.Old), v.viewer.Entry(h.New); {
		case now != nil && (old == nil || old.Sum != now.Sum):
			entries = append(entries, now)
		case now == nil && old != nil:
			change.Removed = append(change.Removed, h.Key())
		}
	}
	slices.Sort(change.Removed)
	encoded, err := proto.Marshal(change)
	if err != nil {
		panic("encoding a change: " + err.Error()) // it has hosts and bytes only
	}
	table := concatenate(entries, protowire.SizeTag(fieldChange)+protowire.SizeBytes(len(encoded)))
	table = protowire.AppendTag(table, fieldChange, protowire.BytesType)
	// The response has the version.
	return newResource("", "", protowire.AppendBytes(table, encoded))
}

// entriesIn returns the entries of some buckets.
func (v *view) entriesIn(all *hosts.Hosts, buckets *digest.Set) []*hosts.Entry {
	var entries []*hosts.Entry
	for i := range digest.Count {
		if !buckets.Has(i) {
			continue
		}
		for host := range all.In(i) {
			if e := v.viewer.Entry(host); e != nil {
				entries = append(entries, e)
			}
		}
	}
	return entries
}
