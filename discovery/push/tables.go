package push

import (
	"bytes"
	"iter"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// tables has the hosts, the views of them, and the sessions of the clients.
type tables struct {
	mu        sync.Mutex
	hosts     *hosts.Hosts
	waiting   string            // why no table is served yet; empty if tables are
	missing   map[string]string // why the objects of a cluster are missing, by name
	views     map[viewKey]*view
	resources map[resourceID]*resource // encoded tables that a view has
	changes   changes                  // that lead to the table of now
	past      history                  // the last changes of all hosts
	revision  []byte                   // of the objects, see [Service.Update]
}

// resourceID identifies the content of a table. Views with the same content share the bytes.
type resourceID struct{ name, version string }

func newTables(all *hosts.Hosts) *tables {
	return &tables{
		hosts: all, waiting: "no object has been read yet", views: map[viewKey]*view{},
		resources: map[resourceID]*resource{}, changes: changes{encoded: map[changeID]*resource{}},
	}
}

// WaitFor sets the reason that is sent to clients while there is no table; an empty string
// says that there is one.
func (s *Service) WaitFor(why string) {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	s.tables.waiting = why
}

// SetMissing sets which clusters have no objects, and why. Their clients are sent no table, because
// they would lose the hosts of their own cluster.
func (s *Service) SetMissing(clusters map[string]string) {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	s.tables.missing = clusters
}

// Update puts changes of the objects to use, and sends each client what has changed for it. Before that
// it calls note with the result, so that no client has a VIP that is not saved, or a table whose errors
// are not reported. It does not wait for clients.
//
// The revision says which state of the sources the objects are of; nil means that this is not known.
func (s *Service) Update(changes []hosts.Change, revision []byte, note func(hosts.Update, hosts.Counts)) hosts.Update {
	u, woken := s.tables.update(changes, revision, note)
	s.rounds.add(woken)
	return u
}

// Diff returns the change that makes objects all those of a source.
func (s *Service) Diff(source int, objects []object.Object) hosts.Change {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	return s.tables.hosts.Diff(source, objects)
}

// Statuses returns the ServiceEntries of a source whose status must change.
func (s *Service) Statuses(source int) map[object.Key]object.VIPStatus {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	return s.tables.hosts.Statuses(source)
}

// update puts changes of the objects to use, and returns the sessions for which something may have
// changed.
func (t *tables) update(changes []hosts.Change, revision []byte, note func(hosts.Update, hosts.Counts)) (u hosts.Update, woken []*session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	u = t.hosts.Update(changes...)
	note(u, t.hosts.Counts())
	t.changes.clear()
	t.revision = revision
	if u.Views {
		t.past = history{} // it was seen in another way
		return u, t.remakeViewsLocked()
	}
	if len(u.Hosts) > 0 {
		t.past.add(step{changes: u.Hosts})
	}
	replaced := map[resourceID]bool{}
	for _, v := range t.views {
		ids := v.update(u.Hosts)
		for _, id := range ids {
			replaced[id] = true
		}
		if len(ids) > 0 {
			woken = slices.AppendSeq(slices.Grow(woken, len(v.sessions)), maps.Keys(v.sessions))
		}
	}
	t.dropUnusedLocked(maps.Keys(replaced))
	return u, woken
}

// remakeViewsLocked makes all views anew after a change that may give a client another view. It
// returns all sessions.
func (t *tables) remakeViewsLocked() []*session {
	var all []*session
	old := t.views
	t.views = map[viewKey]*view{}
	for _, v := range old {
		for s := range v.sessions {
			t.joinLocked(s)
			s.position = s.view.movedLocked(v, s.position)
			all = append(all, s)
		}
	}
	t.dropUnusedLocked(maps.Keys(t.resources))
	return all
}

// join gives a session its view. It reports false if the client has another table than this replica, although
// it comes from a replica with the same revision. The error says that there is no view yet.
func (t *tables) join(s *session) (same bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting != "" {
		return true, status.Error(codes.Unavailable, "no table has been built yet: "+t.waiting)
	}
	if why := t.missing[s.client.cluster]; why != "" {
		return true, status.Error(codes.Unavailable, "there is no table for the client's cluster yet: "+why)
	}
	t.joinLocked(s)
	s.position = s.view.startLocked(s.client.digests)
	now := position{at: s.view.history.now}
	same = s.position == now || s.client.digests == nil || len(t.revision) == 0 || !bytes.Equal(s.client.revision, t.revision)
	s.client.digests, s.client.revision = nil, nil
	return same, nil
}

func (t *tables) joinLocked(s *session) {
	key := s.client.view
	key.Sidecar = t.hosts.Sidecar(key.Namespace, s.client.labels)
	key.Place = t.hosts.Place(s.client.cluster, s.client.network)
	v := t.views[key]
	if v == nil {
		v = newView(t.hosts, key, t.past.steps)
		t.views[key] = v
	}
	v.sessions[s] = struct{}{}
	s.view = v
}

// leave takes a session out of its view. It drops a view without sessions, and the encoded tables that
// no other one has.
func (t *tables) leave(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := s.view
	if delete(v.sessions, s); len(v.sessions) > 0 {
		return
	}
	delete(t.views, v.key)
	for name, had := range v.tables {
		t.dropUnusedLocked(slices.Values([]resourceID{{name, had.version}}))
	}
}

// dropUnusedLocked drops those of the encoded tables that no view has.
func (t *tables) dropUnusedLocked(some iter.Seq[resourceID]) {
	for id := range some {
		used := false
		for _, v := range t.views {
			used = used || v.has(id)
		}
		if !used {
			delete(t.resources, id)
		}
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
	if s.client.mergesHosts {
		s.position = s.view.position(digest.All())
	}
	// If the table has changed since that push, the client is sent the table of now.
	s.position.rejected = version == s.view.version()
}

// forget makes everything that the client of a session has missing.
func (t *tables) forget(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.position = s.view.position(digest.All())
}

// next returns what the client of a session does not have, all of it in state-of-the-world, and the
// versions of what it has then. The caller holds session.mu.
func (t *tables) next(s *session) (p response, versions map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.version = s.view.version()
	if s.client.mergesHosts {
		if r := t.nextChangeLocked(s); r != nil {
			p.resources = []*resource{r}
		}
		return p, nil
	}
	names, versions := s.view.selected(&s.wanted)
	if s.delta() {
		names = slices.DeleteFunc(names, func(name string) bool { return s.versions[name] == versions[name] })
		for name := range s.versions {
			if _, ok := versions[name]; !ok {
				p.removed = append(p.removed, name)
			}
		}
		slices.Sort(p.removed)
	} else if !s.owed && maps.Equal(versions, s.versions) {
		return p, versions
	}
	for _, name := range names {
		p.resources = append(p.resources, t.encodedLocked(s.view, name))
	}
	return p, versions
}

// encodedLocked returns the encoded table of a view with a name.
func (t *tables) encodedLocked(v *view, name string) *resource {
	id := resourceID{name, v.tables[name].version}
	if t.resources[id] == nil {
		t.resources[id] = v.encode(t.hosts, name)
	}
	return t.resources[id]
}

// selected returns the names of the resources that a subscription covers, sorted, and
// their versions.
func (v *view) selected(s *subscription) ([]string, map[string]string) {
	var names []string
	versions := map[string]string{}
	for name, t := range v.tables {
		if s.covers(name) {
			names = append(names, name)
			versions[name] = t.version
		}
	}
	slices.Sort(names)
	return names, versions
}
