package push

import (
	"bytes"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// tables has the hosts, the views of them, and the sessions of the clients. Its locks are taken in the order of the
// fields.
type tables struct {
	began time.Time

	// building is held while objects are read, and while the result is written to disk.
	building sync.Mutex
	hosts    *hosts.Hosts

	// making is held while bases are made, and while a change is applied to bases. Otherwise a base that is made during
	// a change could lack the change.
	making sync.Mutex

	// mu guards the fields below. It is never held while something is read or written, or is made from many hosts. While
	// making is held, set may be read without mu.
	mu          sync.Mutex
	waiting     string            // why no table is served yet; empty if tables are served
	missing     map[string]string // why the objects of a cluster are missing, by name
	scene       *hosts.Scene
	set         hosts.Set
	unusedViews int // number of views without sessions that are kept
	recent      recent
	revision    []byte // of the objects (see [Service.Update])
	bases       map[hosts.Base]*base
	shards      cache[shardID, mem.Buffer]
	resources   cache[resourceID, *resource] // of the current table
	encodings   uint64                       // number of resources that were encoded
}

func newTables(all *hosts.Hosts) *tables {
	return &tables{
		began: time.Now(), hosts: all, scene: all.Scene, waiting: "no object has been read yet", bases: map[hosts.Base]*base{},
		recent: newRecent(0), shards: newCache[shardID](maxEncoded, mem.Buffer.Len),
		resources: newCache[resourceID](maxEncoded, func(r *resource) int { return r.size }),
	}
}

// elapsed returns the time since began. Sessions keep times in this form.
func (t *tables) elapsed() time.Duration { return time.Since(t.began) }

// A change has what an update changes in the bases.
type change struct {
	hosts.Update
	scene    *hosts.Scene
	span     *hosts.Span
	next     [digest.Count][]*hosts.Host
	shifts   map[*base][]shift
	newBases map[hosts.Base]*base // the bases that the change needs and that did not exist
}

// update applies changes of the objects, and returns the sessions for which something may have
// changed.
func (t *tables) update(changes []hosts.Change, revision []byte, report func(hosts.Update, hosts.Counts)) (hosts.Update, []*session) {
	t.building.Lock()
	defer t.building.Unlock()
	u := t.hosts.Update(changes...)
	report(u, t.hosts.Counts())
	t.making.Lock()
	defer t.making.Unlock()
	c := change{
		Update: u, scene: t.hosts.Scene, span: hosts.NewSpan(u.Hosts), next: t.set.Next(u.Hosts),
		shifts: map[*base][]shift{}, newBases: map[hosts.Base]*base{},
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.makeLocked(&c)
	t.set.Apply(u.Hosts, c.next)
	t.scene, t.revision = c.scene, revision
	t.resources.clear()
	if u.Views {
		t.recent.forget()
	} else if len(u.Hosts) > 0 {
		t.recent.add(u.Hosts)
	}
	woken := t.applyLocked(&c)
	return u, t.moveLocked(&c, woken)
}

// makeLocked makes those parts of a change that need a look at many hosts: the new entries of bases and views, and new
// bases. It unlocks mu while it makes them.
func (t *tables) makeLocked(c *change) {
	var tasks []func()
	for _, b := range t.bases {
		if !c.Views && c.span.Reaches(&b.viewer.Base) {
			tasks = append(tasks, func() { c.shifts[b] = b.shifts(c.span.Changes) })
		}
		t.specialLocked(c, b, func(v *view, special []hosts.HostChange) {
			viewer := v.viewer
			tasks = append(tasks, func() { appendVisible(nil, &viewer, special) })
		})
	}
	for {
		for _, v := range t.missingBasesLocked(c) {
			tasks = append(tasks, func() { c.newBases[v.Base] = newBase(v.AtBase(), c.next) })
		}
		if len(tasks) == 0 {
			return
		}
		t.mu.Unlock()
		for _, task := range tasks {
			task()
		}
		tasks = nil
		t.mu.Lock()
	}
}

// missingBasesLocked returns the bases that sessions need after a change and that do not exist yet, each with one of
// its viewers.
func (t *tables) missingBasesLocked(c *change) map[hosts.Base]hosts.Viewer {
	wanted := map[hosts.Base]hosts.Viewer{}
	t.affectedLocked(c, func(s *session) {
		if v := s.viewer(c.scene); t.baseAfterLocked(c, v.Base) == nil {
			wanted[v.Base] = v
		}
	})
	return wanted
}

// baseAfterLocked returns the base with a key after a change; nil if it does not exist yet.
func (t *tables) baseAfterLocked(c *change, key hosts.Base) *base {
	if b := c.newBases[key]; b != nil || c.Views {
		return b
	}
	return t.bases[key]
}

// affectedLocked calls visit for each session that may have another base after a change.
func (t *tables) affectedLocked(c *change, visit func(*session)) {
	all := c.Views
	for namespace := range c.Sidecars {
		all = all || c.scene.IsRoot(namespace)
	}
	if !all && len(c.Sidecars) == 0 {
		return
	}
	for _, b := range t.bases {
		for namespace, v := range b.views {
			if !all && !c.Sidecars[namespace] {
				continue
			}
			for s := range v.sessions {
				visit(s)
			}
		}
	}
}

// specialLocked calls visit for each view of a base that may see some of the changes in another way than the base. It
// passes these changes to visit.
func (t *tables) specialLocked(c *change, b *base, visit func(*view, []hosts.HostChange)) {
	if c.Views || len(c.span.Changes) == 0 {
		return
	}
	call := func(v *view) {
		if special := c.span.Special(&v.viewer); len(special) > 0 {
			visit(v, special)
		}
	}
	if c.span.AllNamespaces() > len(b.views) {
		for _, v := range b.views {
			call(v)
		}
		return
	}
	seen := map[*view]bool{}
	for namespace := range c.span.Namespaces {
		if v := b.views[namespace]; v != nil && !seen[v] {
			seen[v] = true
			call(v)
		}
	}
}

// applyLocked applies a change to the existing bases and their views, and returns the sessions that see it.
func (t *tables) applyLocked(c *change) (woken []*session) {
	for _, b := range t.bases {
		shifts, previous := c.shifts[b], b.last
		for _, s := range shifts {
			t.shards.drop(shardID{b.id, s.shard, b.changed[s.shard]})
		}
		b.apply(shifts, t.recent.current)
		special := map[*view]bool{}
		t.specialLocked(c, b, func(v *view, changes []hosts.HostChange) {
			last, sees := max(previous, v.last), len(shifts) > 0
			for _, one := range changes {
				sees = v.apply(one, t.recent.current) || sees
			}
			if special[v] = true; sees {
				woken = t.wakeLocked(woken, v, last)
			}
		})
		if len(shifts) > 0 {
			for _, v := range b.views {
				if !special[v] {
					woken = t.wakeLocked(woken, v, max(previous, v.last))
				}
			}
		}
	}
	return woken
}

// wakeLocked appends to woken the sessions of a view that has changed. The parameter previous is the generation of the
// view's previous change. A session that is at this generation or later lacks only the current change, so its position
// becomes the last generation before the current one.
func (t *tables) wakeLocked(woken []*session, v *view, previous generation) []*session {
	now := t.elapsed()
	for s := range v.sessions {
		if s.position.generation >= previous {
			s.position.generation = max(s.position.generation, t.recent.current-1)
		}
		s.wake(now)
		woken = append(woken, s)
	}
	return woken
}

// moveLocked gives sessions the views that they have after a change. It appends to woken the sessions that have got
// another view.
func (t *tables) moveLocked(c *change, woken []*session) []*session {
	moved := map[*session]*base{}
	t.affectedLocked(c, func(s *session) {
		if to := t.baseAfterLocked(c, s.viewer(c.scene).Base); to != s.view.base {
			moved[s] = to
		}
	})
	if c.Views {
		t.bases = map[hosts.Base]*base{}
	}
	for s, to := range moved {
		old, p := s.view, s.position
		if delete(old.sessions, s); len(old.sessions) == 0 {
			t.dropLocked(old) // it is not kept, because no client may see its hosts any more
		}
		t.enterLocked(s, to)
		p.missing.Join(old.changedSince(p.generation))
		p.missing.Join(s.view.differsFrom(old))
		p.generation = t.recent.current
		s.position = p
		s.wake(t.elapsed())
		woken = append(woken, s)
	}
	return woken
}

// join gives a session its view. The result consistent is false if the client's table differs from the table that this
// replica serves, although both tables have the same revision. join returns an error if there is no table yet.
func (t *tables) join(s *session) (consistent bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting != "" {
		return true, status.Error(codes.Unavailable, "no table has been built yet: "+t.waiting)
	}
	if why := t.missing[s.client.cluster]; why != "" {
		return true, status.Error(codes.Unavailable, "there is no table for the client's cluster yet: "+why)
	}
	b := t.bases[s.viewer(t.scene).Base]
	if b == nil {
		b = t.makeBaseLocked(s)
		defer t.making.Unlock()
	}
	t.enterLocked(s, b)
	s.position = position{generation: t.recent.current, missing: digest.All()}
	if s.client.digests != nil {
		s.position.missing = s.view.differing(s.client.digests)
	}
	consistent = s.position.missing == (digest.Set{}) || s.client.digests == nil || len(t.revision) == 0 || !bytes.Equal(s.client.revision, t.revision)
	s.client.digests, s.client.revision = nil, nil
	return consistent, nil
}

// makeBaseLocked returns the base of a session, and makes it if it does not exist. It unlocks mu while it makes the
// base. It locks making, and the caller must unlock making after it has used the base, so that no change comes in
// between.
func (t *tables) makeBaseLocked(s *session) *base {
	t.mu.Unlock()
	t.making.Lock()
	t.mu.Lock()
	v := s.viewer(t.scene)
	if b := t.bases[v.Base]; b != nil {
		return b // another client has needed it, too
	}
	t.mu.Unlock()
	b := newBase(v.AtBase(), t.set.Shards())
	t.mu.Lock()
	return b
}

// enterLocked gives a session the view of its namespace in a base, and makes the view if it does not exist.
func (t *tables) enterLocked(s *session, b *base) {
	namespace := s.client.view.Namespace
	v := b.views[namespace]
	if v == nil {
		v = newView(b, s.viewer(t.scene), &t.set, t.recent.current)
		b.views[namespace] = v
	}
	if v.dropTimer != nil {
		v.dropTimer.Stop()
		v.dropTimer = nil
		t.unusedViews--
	}
	v.sessions[s] = struct{}{}
	s.view, t.bases[b.viewer.Base] = v, b
}

const (
	// keepViews is how long a view without sessions is kept. If it were dropped at once, a client that connects again and
	// again, and is the only one of its namespace, would make the server look at all hosts each time.
	keepViews = 10 * time.Second
	// maxUnused bounds the number of views that are kept without sessions.
	maxUnused = 1 << 10
)

// leave takes a session out of its view. A view without sessions is dropped after keepViews, or at once if maxUnused
// views are kept already.
func (t *tables) leave(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := s.view
	if delete(v.sessions, s); len(v.sessions) > 0 {
		return
	}
	if t.unusedViews >= maxUnused {
		t.dropLocked(v)
		return
	}
	t.unusedViews++
	var timer *time.Timer
	timer = time.AfterFunc(keepViews, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if v.dropTimer == timer { // no session has entered meanwhile
			v.dropTimer = nil
			t.unusedViews--
			t.dropLocked(v)
		}
	})
	v.dropTimer = timer
}

// dropLocked drops a view without sessions. A base that a Sidecar limits is dropped with its last view, because there
// may be many such bases.
func (t *tables) dropLocked(v *view) {
	b := v.base
	if b.views[v.viewer.Namespace] == v {
		delete(b.views, v.viewer.Namespace)
	}
	if b.viewer.Sidecar != (hosts.Limit{}) && len(b.views) == 0 && t.bases[b.viewer.Base] == b {
		delete(t.bases, b.viewer.Base)
	}
}

// answered notes the answer of a client to the push of a version.
func (t *tables) answered(s *session, version string, rejected bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !rejected {
		s.accepted = version
		return
	}
	// If the table has changed since that push, the client is sent the current table.
	s.position = position{generation: t.recent.current, missing: digest.All(), rejected: version == s.view.version(), sum: s.view.sum()}
}

// forget marks the whole table as missing at the client of a session.
func (t *tables) forget(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.position = position{generation: t.recent.current, missing: digest.All()}
}

// next returns what the client of a session does not have; nil if the client has everything. The result needsRoom is
// true if [Config.Room] must permit the resource: the resource was encoded for this session, is large, and is not
// shared with all namespaces. The caller holds session.mu.
func (t *tables) next(s *session) (r *resource, version string, needsRoom bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	version, s.woken = s.view.version(), 0
	previous := t.encodings
	defer func() { needsRoom = t.encodings != previous && r.size >= maxSmall && s.view.isOwn() }()
	switch {
	case s.client.mergesHosts:
		return t.nextChangeLocked(s), version, needsRoom
	case !s.wanted, s.version == version && (s.delta() || !s.owed):
		return nil, version, needsRoom
	}
	return t.wholeLocked(s.view), version, needsRoom
}

// sizes returns how many bytes the hosts of each namespace have in the table of a session.
func (t *tables) sizes(s *session) map[string]int {
	t.mu.Lock()
	viewer, shards := s.view.viewer, t.set.Shards()
	t.mu.Unlock()
	sizes := map[string]int{}
	for _, some := range shards {
		for _, h := range some {
			if e := viewer.Entry(h); e != nil {
				sizes[h.Namespace()] += len(e.Encoded)
			}
		}
	}
	return sizes
}

// A resource of maxSmall bytes or more counts as large. Most changes are smaller, and are sent without a call of
// Config.Room.
const maxSmall = 64 << 10

// nextChangeLocked returns the change from the table of a client that merges hosts to the current table. Unless s.owed
// is set, it returns nil if the client has the current table, or has rejected it.
func (t *tables) nextChangeLocked(s *session) *resource {
	v, p := s.view, s.position
	sum := v.sum()
	if p.rejected && p.sum == sum && !s.owed {
		return nil
	}
	complete := p.missing
	span := t.recent.spanFrom(p.generation)
	switch {
	case p.rejected:
		complete = digest.All()
	case span == nil:
		complete.Join(v.changedSince(p.generation))
	}
	if complete == digest.All() {
		span = nil
	}
	s.position = position{generation: t.recent.current}
	id, d := resourceID{change: true, table: v.tableID(), wholeShards: complete}, &delta{}
	if span != nil {
		special := span.Special(&v.viewer)
		if d, id.changesSince = t.recent.visibleTo(v, p.generation, special, &complete), p.generation; len(special) > 0 {
			id.table = v.id
		}
	}
	if len(d.entries) == 0 && complete == (digest.Set{}) && !s.owed {
		return nil
	}
	r := t.resources.encoded[id]
	if r == nil {
		r = t.encodeChangeLocked(v, &complete, d)
		t.encodings++
		t.resources.add(id, r)
	}
	return r
}

// encodeChangeLocked encodes a change.
func (t *tables) encodeChangeLocked(v *view, complete *digest.Set, d *delta) *resource {
	r := &resource{}
	size := protowire.SizeTag(fieldSum) + protowire.SizeBytes(digest.SumSize) + len(d.removed)
	if *complete != (digest.Set{}) {
		size += protowire.SizeTag(fieldComplete) + protowire.SizeBytes(digest.SetSize)
		for shard := range digest.Count {
			if complete.Has(shard) {
				r.add(t.shardLocked(v, shard))
			}
		}
	}
	if len(t.revision) > 0 {
		size += protowire.SizeTag(fieldRevision) + protowire.SizeBytes(len(t.revision))
	}
	r.add(d.added)
	tail := appendTagSize(make([]byte, 0, size+8), fieldChange, size)
	if *complete != (digest.Set{}) {
		tail = protowire.AppendBytes(protowire.AppendTag(tail, fieldComplete, protowire.BytesType), complete[:])
	}
	tail = append(tail, d.removed...)
	tail = protowire.AppendTag(tail, fieldSum, protowire.BytesType)
	tail = protowire.AppendBytes(tail, v.sum().Bytes())
	if len(t.revision) > 0 {
		tail = protowire.AppendBytes(protowire.AppendTag(tail, fieldRevision, protowire.BytesType), t.revision)
	}
	r.add(mem.SliceBuffer(tail))
	return r
}

// wholeLocked returns the table of a view.
func (t *tables) wholeLocked(v *view) *resource {
	id := resourceID{table: v.tableID()}
	if r := t.resources.encoded[id]; r != nil {
		return r
	}
	r := &resource{version: v.version()}
	t.encodings++
	for shard := range digest.Count {
		r.add(t.shardLocked(v, shard))
	}
	t.resources.add(id, r)
	return r
}

// shardLocked returns the encoded entries of a shard of a view; nil if the shard has no hosts.
func (t *tables) shardLocked(v *view, shard int) mem.Buffer {
	all := t.set.Shards()[shard]
	if len(all) == 0 {
		return nil
	}
	id := v.shardID(shard)
	if b, found := t.shards.encoded[id]; found {
		return b
	}
	b := mem.SliceBuffer(concatenate(shown(&v.viewer, all)))
	t.shards.add(id, b)
	return b
}
