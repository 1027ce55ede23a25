package hosts

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/object"
)

// A Set has all hosts, and follows their changes. The zero value has no hosts.
type Set struct {
	shards [digest.Count][]*Host // sorted by key; a change replaces the slice
	// The fields below find the hosts that a namespace may see in another way than other namespaces do. exported has the
	// hosts with an exportTo that names the namespace. If the list in the exportTo is long, the hosts are in long instead.
	// inside has the hosts that an object in the namespace claims.
	exported map[string]map[*export]bool
	long     map[*export]bool
	inside   map[string]map[string]*Host
	exports  map[string]*export // by the key that exportKeys.key returns
}

// maxIndexed is the length of the longest exportTo that is indexed by its namespaces. A longer one is searched each
// time. An index takes about 300 bytes for each namespace, and an exportTo may name 250,000 namespaces.
const maxIndexed = 16

// An export has the hosts that have the same list of namespaces in an exportTo.
type export struct {
	namespaces namespaces
	hosts      map[string]*Host
}

// namespaces is a sorted list of names of namespaces.
type namespaces []string

// long reports whether a list is too long for an index.
func (n namespaces) long() bool { return len(n) > maxIndexed }

// has reports whether the list has a namespace.
func (n namespaces) has(namespace string) bool {
	_, found := slices.BinarySearch(n, namespace)
	return found
}

// exportKeys makes keys of lists of namespaces. Lists with the same content have the same key. It remembers the keys of
// the lists that it has seen, because all hosts of an object share a list.
type exportKeys map[*string]string

// key returns the key of a list that is not empty.
func (k exportKeys) key(namespaces []string) string {
	key, known := k[&namespaces[0]]
	if !known {
		key = strings.Join(namespaces, ",")
		k[&namespaces[0]] = key
	}
	return key
}

// Shards returns the hosts by shard, sorted by key. Later changes do not change the result.
func (s *Set) Shards() [digest.Count][]*Host { return s.shards }

// Next returns the hosts, by shard, as they will be after changes. It does not change the Set.
func (s *Set) Next(changes []HostChange) [digest.Count][]*Host {
	next, byShard := s.shards, map[int][]HostChange{}
	for _, c := range changes {
		shard := digest.ShardOf(c.Key())
		byShard[shard] = append(byShard[shard], c)
	}
	for shard, some := range byShard {
		next[shard] = merged(next[shard], some)
	}
	return next
}

// Apply applies changes. The parameter next is the result of Next for the same changes.
func (s *Set) Apply(changes []HostChange, next [digest.Count][]*Host) {
	s.shards = next
	if s.exported == nil {
		s.exported, s.inside, s.exports = map[string]map[*export]bool{}, map[string]map[string]*Host{}, map[string]*export{}
		s.long = map[*export]bool{}
	}
	keys, left := exportKeys{}, map[string]bool{}
	for _, c := range changes {
		for namespaces := range c.Old.exportedTo {
			key := keys.key(namespaces)
			delete(s.exports[key].hosts, c.Old.Key)
			left[key] = true
		}
		for namespace := range c.Old.namespaces {
			removeInner(s.inside, namespace, c.Old.Key)
		}
		for namespaces := range c.New.exportedTo {
			s.export(keys.key(namespaces), namespaces).hosts[c.New.Key] = c.New
		}
		for namespace := range c.New.namespaces {
			innerMap(s.inside, namespace)[c.New.Key] = c.New
		}
	}
	for key := range left {
		if e := s.exports[key]; len(e.hosts) == 0 {
			delete(s.exports, key)
			delete(s.long, e)
			if !e.namespaces.long() {
				for _, namespace := range e.namespaces {
					removeInner(s.exported, namespace, e)
				}
			}
		}
	}
}

// export returns the export with a key, and adds the export if it does not exist.
func (s *Set) export(key string, list namespaces) *export {
	e := s.exports[key]
	if e != nil {
		return e
	}
	e = &export{list, map[string]*Host{}}
	s.exports[key] = e
	if list.long() {
		s.long[e] = true
		return e
	}
	for _, namespace := range list {
		innerMap(s.exported, namespace)[e] = true
	}
	return e
}

// exportedTo yields the exports whose list has a namespace.
func (s *Set) exportedTo(namespace string) iter.Seq[*export] {
	return func(yield func(*export) bool) {
		for e := range s.exported[namespace] {
			if !yield(e) {
				return
			}
		}
		for e := range s.long {
			if e.namespaces.has(namespace) && !yield(e) {
				return
			}
		}
	}
}

// Special yields the hosts that v may see in another way than v.AtBase, in no particular order.
func (s *Set) Special(v *Viewer) iter.Seq[*Host] {
	return func(yield func(*Host) bool) {
		seen := map[string]bool{}
		for e := range s.exportedTo(v.Namespace) {
			for key, h := range e.hosts {
				if !seen[key] && !yield(h) {
					return
				}
				seen[key] = true
			}
		}
		if !v.SeesOwn() {
			return
		}
		for key, h := range s.inside[v.Namespace] {
			if !seen[key] && !yield(h) {
				return
			}
		}
	}
}

// merged returns hosts with changes applied. It sorts changes; hosts must be sorted by key. Both must have each key
// only once.
func merged(hosts []*Host, changes []HostChange) []*Host {
	slices.SortFunc(changes, func(a, b HostChange) int { return strings.Compare(a.Key(), b.Key()) })
	next := make([]*Host, 0, len(hosts)+len(changes))
	for _, c := range changes {
		i, found := slices.BinarySearchFunc(hosts, c.Key(), func(h *Host, key string) int { return strings.Compare(h.Key, key) })
		next = append(next, hosts[:i]...)
		if c.New != nil {
			next = append(next, c.New)
		}
		if hosts = hosts[i:]; found {
			hosts = hosts[1:]
		}
	}
	return slices.Clip(append(next, hosts...))
}

// A Span has the combined effect of several changes on the hosts.
type Span struct {
	Changes []HostChange // sorted by key
	// The same changes by the namespaces that may see them in another way than other namespaces do, see [Set].
	exported map[string][]*exportChanges // by namespace, without long
	long     []*exportChanges
	inside   map[string][]HostChange
}

// exportChanges are the changes of hosts with one list of namespaces in an exportTo.
type exportChanges struct {
	namespaces namespaces
	changes    []HostChange
}

// NewSpan returns the span of the changes in steps, which follow one another.
func NewSpan(steps ...[]HostChange) *Span {
	first := map[string]*Host{}
	last := map[string]*Host{}
	for _, changes := range steps {
		for _, c := range changes {
			if _, again := last[c.Key()]; !again {
				first[c.Key()] = c.Old
			}
			last[c.Key()] = c.New
		}
	}
	s := &Span{Changes: make([]HostChange, 0, len(last)), exported: map[string][]*exportChanges{}, inside: map[string][]HostChange{}}
	keys, exports := exportKeys{}, map[string]*exportChanges{}
	for _, key := range slices.Sorted(maps.Keys(last)) {
		c := HostChange{first[key], last[key]}
		if c.Old == nil && c.New == nil {
			continue
		}
		s.Changes = append(s.Changes, c)
		for _, h := range []*Host{c.Old, c.New} {
			for namespaces := range h.exportedTo {
				e := s.export(keys.key(namespaces), namespaces, exports)
				e.changes = appendOnce(e.changes, c)
			}
			for namespace := range h.namespaces {
				s.inside[namespace] = appendOnce(s.inside[namespace], c)
			}
		}
	}
	return s
}

// export returns the exportChanges for a list of namespaces with this key, and adds them to s and known if they do not
// exist.
func (s *Span) export(key string, list namespaces, known map[string]*exportChanges) *exportChanges {
	e := known[key]
	if e != nil {
		return e
	}
	e = &exportChanges{namespaces: list}
	known[key] = e
	if list.long() {
		s.long = append(s.long, e)
		return e
	}
	for _, namespace := range list {
		s.exported[namespace] = append(s.exported[namespace], e)
	}
	return e
}

// appendOnce appends a change unless it is the last one.
func appendOnce(all []HostChange, c HostChange) []HostChange {
	if n := len(all); n > 0 && all[n-1] == c {
		return all
	}
	return append(all, c)
}

// Special returns the changes that v may see in another way than v.AtBase, sorted by key.
func (s *Span) Special(v *Viewer) []HostChange {
	var lists [][]HostChange
	for _, e := range s.exported[v.Namespace] {
		lists = append(lists, e.changes)
	}
	for _, e := range s.long {
		if e.namespaces.has(v.Namespace) {
			lists = append(lists, e.changes)
		}
	}
	if inside := s.inside[v.Namespace]; len(inside) > 0 && v.SeesOwn() {
		lists = append(lists, inside)
	}
	switch len(lists) {
	case 0:
		return nil
	case 1:
		return lists[0]
	}
	all := slices.Concat(lists...)
	slices.SortFunc(all, func(a, b HostChange) int { return strings.Compare(a.Key(), b.Key()) })
	return slices.Compact(all)
}

// Namespaces yields the namespaces for which Special may return changes. A namespace may come twice.
func (s *Span) Namespaces(yield func(string) bool) {
	for namespace := range s.exported {
		if !yield(namespace) {
			return
		}
	}
	for namespace := range s.inside {
		if !yield(namespace) {
			return
		}
	}
	for _, e := range s.long {
		for _, namespace := range e.namespaces {
			if !yield(namespace) {
				return
			}
		}
	}
}

// AllNamespaces returns the number of namespaces that Namespaces yields. A namespace that comes twice counts twice.
func (s *Span) AllNamespaces() int {
	n := s.Indexed()
	for _, e := range s.long {
		n += len(e.namespaces)
	}
	return n
}

// Indexed returns the number of namespaces for which the span has an index.
func (s *Span) Indexed() int { return len(s.exported) + len(s.inside) }

// Reaches reports whether a viewer at the base b (see [Viewer.AtBase]) may see a change of the span. If b has a
// Sidecar, the Sidecar must show hosts of a namespace in which a host has changed.
func (s *Span) Reaches(b *Base) bool {
	if b.Sidecar.sidecar == nil {
		return len(s.Changes) > 0
	}
	return object.FromAny(b.Sidecar.sidecar.egress, s.inside)
}
