package push

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// Field numbers of NameTable.change and of its fields.
const (
	fieldChange   = 1001
	fieldComplete = 1
	fieldGone     = 2
	fieldSum      = 3
	fieldRevision = 4
)

// A position says what a client that merges hosts has: its table in a generation, except for the shards in the field
// missing. Generations number the changes of the hosts. A position is guarded by tables.mu.
type position struct {
	generation generation
	missing    digest.Set
	// rejected is true if the client has rejected its table; the field sum is the checksum of that table. The client is
	// sent its whole table, but only after the table has changed: the client might reject the same content again.
	rejected bool
	sum      digest.Sum
}

// maxRecent bounds the number of changed hosts that are kept, and maxRecentWeight their size, in bytes: a host may have
// thousands of addresses of which only one changes. A client that lacks older changes is sent the shards that have
// changed.
const (
	maxRecent       = 1 << 11
	maxRecentWeight = 16 << 20
)

// recent has the last changes of all hosts.
type recent struct {
	current generation
	steps   [][]hosts.HostChange // the changes of each generation; the last one leads to the current generation
	// size is the number of changed hosts in steps, and weight about how many bytes they have.
	size, weight int
	// spans has all changes since a generation, and deltas has what a base sees of a span. Both are caches: they have
	// only spans and deltas that a client has needed since the last change.
	spans  cache[generation, *hosts.Span]
	deltas cache[deltaID, *delta]
}

// deltaID identifies what a base sees of the changes since a generation.
type deltaID struct {
	from generation
	base *identity
}

// maxSpans bounds the bytes of spans that are kept. It also bounds the bytes of deltas, separately. changeSize is about
// how many bytes a span has for each change, and for each namespace of its index.
const (
	maxSpans   = 8 << 20
	changeSize = 150
)

// newRecent returns a recent without changes, whose current generation is start.
func newRecent(start generation) recent {
	return recent{
		current: start, spans: newCache[generation](maxSpans, func(s *hosts.Span) int { return changeSize * (len(s.Changes) + s.Indexed()) }),
		deltas: newCache[deltaID](maxSpans, (*delta).size),
	}
}

// add begins the next generation. The parameter changes has all changes between the current generation and the next.
func (r *recent) add(changes []hosts.HostChange) {
	r.current++
	r.spans.clear()
	r.deltas.clear()
	r.steps = append(r.steps, changes)
	r.size, r.weight = r.size+len(changes), r.weight+weight(changes)
	for ; r.size > maxRecent || r.weight > maxRecentWeight; r.steps = r.steps[1:] {
		r.size, r.weight = r.size-len(r.steps[0]), r.weight-weight(r.steps[0])
		r.steps[0] = nil
	}
}

// weight returns about how many bytes changed hosts have. It counts the new content only: the old
// content was counted with an earlier change.
func weight(changes []hosts.HostChange) (n int) {
	for _, c := range changes {
		n += c.New.Weight()
	}
	return n
}

// forget begins the next generation and drops all changes. It is called for an update that is more than a list of
// changed hosts.
func (r *recent) forget() { *r = newRecent(r.current + 1) }

// spanFrom returns the span from a generation to the current one; nil if not all of its changes are kept any more.
func (r *recent) spanFrom(g generation) *hosts.Span {
	if s := r.spans.encoded[g]; s != nil {
		return s
	}
	behind := r.current - g
	if behind > generation(len(r.steps)) {
		return nil
	}
	s := hosts.NewSpan(r.steps[len(r.steps)-int(behind):]...) //nolint:gosec // at most the length
	r.spans.add(g, s)
	return s
}

// A delta has the changes of a span that a base, or a view, sees.
type delta struct {
	entries []entryChange
	added   mem.Buffer // the entries that still exist
	removed []byte     // the removed entries, as fields of a Change
}

// An entryChange is a change of the entry of a host. The field entry is the new entry; nil if the entry was removed.
type entryChange struct {
	key   string
	entry *hosts.Entry
}

// visibleToBase returns what a base sees of the changes since a generation.
func (r *recent) visibleToBase(b *base, g generation) *delta {
	id := deltaID{g, b.id}
	d := r.deltas.encoded[id]
	if d == nil {
		d = &delta{entries: appendVisible(nil, &b.viewer, r.spanFrom(g).Changes)}
		d.encode()
		r.deltas.add(id, d)
	}
	return d
}

// size returns about how many bytes the delta has.
func (d *delta) size() int {
	const entry = 24
	return d.added.Len() + len(d.removed) + entry*len(d.entries)
}

// appendVisible appends the changes that a viewer sees.
func appendVisible(to []entryChange, v *hosts.Viewer, changes []hosts.HostChange) []entryChange {
	for _, c := range changes {
		if old, updated := v.Entry(c.Old), v.Entry(c.New); differ(old, updated) {
			to = append(to, entryChange{c.Key(), updated})
		}
	}
	return to
}

// encode sets the fields added and removed.
func (d *delta) encode() {
	var entries []*hosts.Entry
	for _, e := range d.entries {
		if e.entry != nil {
			entries = append(entries, e.entry)
			continue
		}
		d.removed = protowire.AppendString(protowire.AppendTag(d.removed, fieldGone, protowire.BytesType), e.key)
	}
	d.added = mem.SliceBuffer(concatenate(entries))
}

// without returns the entries of d. It leaves out those in the shards of the parameter complete, and those of the hosts
// in the parameter others.
func (d *delta) without(complete *digest.Set, others []hosts.HostChange) []entryChange {
	var left []entryChange
	keys := make(map[string]bool, len(others))
	for _, c := range others {
		keys[c.Key()] = true
	}
	for _, e := range d.entries {
		if !keys[e.key] && !complete.Has(digest.ShardOf(e.key)) {
			left = append(left, e)
		}
	}
	return left
}

// visibleTo returns what a view sees of the changes since a generation. It leaves out the shards in the parameter
// complete. The parameter special has the changes that the view may see in another way than its base.
func (r *recent) visibleTo(v *view, g generation, special []hosts.HostChange, complete *digest.Set) *delta {
	d := r.visibleToBase(v.base, g)
	if len(special) == 0 && *complete == (digest.Set{}) {
		return d
	}
	mine := delta{entries: appendVisible(nil, &v.viewer, special)}
	d = &delta{entries: append(d.without(complete, special), mine.without(complete, nil)...)}
	d.encode()
	return d
}
