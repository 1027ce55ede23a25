package push

import (
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// tables has the hosts, the tables of the views, and the sessions of the clients. Its locks are taken in the order of the
// fields.
type tables struct {
	began   time.Time
	waiting func() string // see [Config]

	// building is held while changes are applied to hosts, and while the result is reported.
	building sync.Mutex
	hosts    *hosts.Hosts

	// making is held while bases and views are made, and while a change is applied to them. Otherwise a view that is made
	// during a change could lack the change. It guards the fields below.
	making  sync.Mutex
	shards  *hosts.Shards
	special *hosts.Special

	// mu guards the fields below. It is never held while something is read or written, or is made from many hosts.
	mu      sync.Mutex
	missing map[string]string // why the objects of a cluster are missing, by name
	scene   *hosts.Scene      // making is held, too, while it is replaced
	bases   map[hosts.Base]*base

	encoding sync.Mutex // guards the bytes of all shards
}

// A base is what the views of several namespaces have in common. The views differ from it only in the shards that
// [hosts.Special] yields.
type base struct {
	viewer hosts.Viewer
	hosts  *hosts.Shards    // of which the table is made; guarded by tables.mu
	table  *table           // guarded by tables.mu
	views  map[string]*view // by namespace; guarded by tables.mu
}

// A view is what the clients with the same base and namespace see.
type view struct {
	base   *base
	viewer hosts.Viewer

	// The fields below are guarded by tables.mu.

	table    *table // that of the base if it is equal to it
	sessions map[*session]struct{}
	unused   bool // it had no sessions at the last sweep, and has had none since
}

func newTables(all *hosts.Hosts, waiting func() string) *tables {
	return &tables{
		began: time.Now(), hosts: all, shards: new(hosts.Shards), special: hosts.NewSpecial(), scene: all.Scene,
		waiting: waiting, bases: map[hosts.Base]*base{},
	}
}

// elapsed returns the time since began. Sessions keep times in this form.
func (t *tables) elapsed() time.Duration { return time.Since(t.began) }

// isOwn reports whether only some namespaces share the table, because of a Sidecar or an exportTo.
func (v *view) isOwn() bool { return v.table != v.base.table || v.viewer.Sidecar != (hosts.Limit{}) }

// after returns the table of the base after changes of hosts, and the shards that the changes change in it.
func (b *base) after(changes []hosts.HostChange, shardsOf *maker) (next *table, changed map[int]bool) {
	changed = map[int]bool{}
	for _, c := range changes {
		if b.viewer.Entry(c.Old).Differs(b.viewer.Entry(c.New)) {
			changed[digest.ShardOf(c.Key())] = true
		}
	}
	if len(changed) == 0 {
		return b.table, nil
	}
	shards := *b.table.base
	for i := range changed {
		shards[i] = shardsOf.shard(&b.viewer, i)
	}
	return &table{base: &shards}, changed
}

// after returns the table of the view after a change. The parameter of is the table of the base after the change, in
// which some shards have changed; in the shards special, the view may see a changed host in another way than the base.
func (v *view) after(of *table, changed map[int]bool, special []int, shardsOf *maker) *table {
	stale, own := slices.Clone(special), v.table.own
	for i := range own {
		if changed[i] {
			stale = append(stale, i)
		}
	}
	if len(stale) > 0 {
		own = map[int]*shard{}
		maps.Copy(own, v.table.own)
	}
	for _, i := range stale {
		if own[i] = shardsOf.shard(&v.viewer, i); same(own[i], of.base[i]) {
			delete(own, i)
		}
	}
	switch {
	case len(own) == 0:
		return of
	case len(stale) == 0 && of.base == v.table.base:
		return v.table
	}
	return &table{base: of.base, own: own}
}

// update applies changes of the objects, and returns the sessions for which something may have changed.
func (t *tables) update(changes []hosts.Change, report func(hosts.Update, hosts.Counts)) (hosts.Update, []*session) {
	t.building.Lock()
	defer t.building.Unlock()
	u := t.hosts.Update(changes...)
	report(u, t.hosts.Counts())
	t.making.Lock()
	defer t.making.Unlock()
	t.shards = t.shards.After(u.Hosts)
	t.special.Follow(u.Hosts)
	bases, views := t.changed(&u)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.scene = t.hosts.Scene
	affected := t.affectedLocked(&u)
	if u.Views {
		t.bases = map[hosts.Base]*base{}
	}
	for b, next := range bases {
		b.table, b.hosts = next, t.shards
	}
	var woken []*session
	now := t.elapsed()
	for v, next := range views {
		v.table = next
		for s := range v.sessions {
			s.wake(now)
			woken = append(woken, s)
		}
	}
	return u, t.moveLocked(affected, woken)
}

// changed returns the tables after an update: of all bases, and of the views that change. If no host has changed, or the
// views themselves have, it returns none.
func (t *tables) changed(u *hosts.Update) (bases map[*base]*table, views map[*view]*table) {
	if len(u.Hosts) == 0 || u.Views {
		return nil, nil
	}
	bases, views = map[*base]*table{}, map[*view]*table{}
	touched := hosts.NewTouched(u.Hosts)
	t.mu.Lock()
	all := map[*base][]*view{}
	for _, b := range t.bases {
		all[b] = slices.Collect(maps.Values(b.views))
	}
	t.mu.Unlock()
	for b, some := range all {
		next, changed, shardsOf := b.table, map[int]bool(nil), newMaker(t.shards)
		if touched.Reaches(&b.viewer.Base) {
			next, changed = b.after(u.Hosts, shardsOf)
		}
		bases[b] = next
		for _, v := range some {
			if now := v.after(next, changed, touched.Shards(&v.viewer), shardsOf); now != v.table {
				views[v] = now
			}
		}
	}
	return bases, views
}

// affectedLocked returns the views whose sessions may have another view after an update.
func (t *tables) affectedLocked(u *hosts.Update) (affected []*view) {
	all := u.Views
	for namespace := range u.Sidecars {
		all = all || t.scene.IsRoot(namespace)
	}
	if !all && len(u.Sidecars) == 0 {
		return nil
	}
	for _, b := range t.bases {
		for namespace, v := range b.views {
			if all || u.Sidecars[namespace] {
				affected = append(affected, v)
			}
		}
	}
	return affected
}

// moveLocked gives the sessions of affected views the views that they have now. It appends to woken the sessions that have
// got another view.
func (t *tables) moveLocked(affected []*view, woken []*session) []*session {
	for _, old := range affected {
		for _, s := range slices.Collect(maps.Keys(old.sessions)) {
			to := t.viewLocked(s)
			if _, open := old.sessions[s]; !open || to == old { // it may have ended meanwhile
				continue
			}
			delete(old.sessions, s)
			t.enterLocked(s, to)
			s.wake(t.elapsed())
			woken = append(woken, s)
		}
		if len(old.sessions) == 0 {
			t.dropLocked(old) // it is not kept, because no client may see its hosts any more
		}
	}
	return woken
}

// join gives a session its view. It returns an error if there is no table yet.
func (t *tables) join(s *session) error {
	if why := t.waiting(); why != "" {
		return status.Error(codes.Unavailable, "no table has been built yet: "+why)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if why := t.missing[s.said().cluster]; why != "" {
		return status.Error(codes.Unavailable, "there is no table for the client's cluster yet: "+why)
	}
	if v := t.findLocked(s.viewer(t.scene)); v != nil {
		t.enterLocked(s, v)
		return nil
	}
	t.mu.Unlock()
	t.making.Lock()
	defer t.making.Unlock()
	t.mu.Lock()
	t.enterLocked(s, t.viewLocked(s))
	return nil
}

// findLocked returns the view of a viewer, nil if it does not exist.
func (t *tables) findLocked(viewer hosts.Viewer) *view {
	if b := t.bases[viewer.Base]; b != nil {
		return b.views[viewer.Namespace]
	}
	return nil
}

// viewLocked returns the view of a session, and makes it if it does not exist. It unlocks mu while it makes the view. The
// caller holds making, too.
func (t *tables) viewLocked(s *session) *view {
	viewer := s.viewer(t.scene)
	if v := t.findLocked(viewer); v != nil {
		return v
	}
	b, shards := t.bases[viewer.Base], newMaker(t.shards)
	t.mu.Unlock()
	if b == nil {
		b = &base{viewer: viewer.AtBase(), hosts: t.shards, table: &table{base: new([digest.Count]*shard)}, views: map[string]*view{}}
		for i := range digest.Count {
			b.table.base[i] = shards.shard(&b.viewer, i)
		}
	}
	v := &view{base: b, viewer: viewer, table: b.table, sessions: map[*session]struct{}{}}
	v.table = v.after(b.table, nil, t.special.Shards(&viewer), shards)
	t.mu.Lock()
	b.views[viewer.Namespace], t.bases[viewer.Base] = v, b
	return v
}

// enterLocked gives a session a view.
func (t *tables) enterLocked(s *session, v *view) {
	v.sessions[s] = struct{}{}
	s.view, v.unused = v, false
}

// keepViews is how long a view without sessions is kept, at least. If it were dropped at once, a client that connects again
// and again, and is the only one of its namespace, would make the server look at many hosts each time.
const keepViews = 10 * time.Second

// sweep drops the views that have had no sessions since the last sweep.
func (t *tables) sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.bases {
		for _, v := range b.views {
			if v.unused && len(v.sessions) == 0 {
				t.dropLocked(v)
			}
			v.unused = len(v.sessions) == 0
		}
	}
}

// leave takes a session out of its view.
func (t *tables) leave(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(s.view.sessions, s)
}

// dropLocked drops a view. A base that a Sidecar limits is dropped with its last view, because there
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

// current returns the table that the client of a session should have, and what its shards are made of. The result own is
// true if only some namespaces share the table. The session then lacks nothing of an earlier change.
func (t *tables) current(s *session) (now *table, of *source, own bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := s.view
	s.woken = 0
	return v.table, &source{v.base.hosts, v.viewer, v.base.viewer}, v.isOwn()
}
