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
	// The fields below find the hosts that a namespace may see in another way than other namespaces do, by the namespace
	// and the key of the host. See [Host.audiences].
	named, inside map[string]map[string]*Host
	long          map[*string]*export // by the first element of the list
}

// maxIndexed is the length of the longest exportTo that is indexed by its namespaces. A longer one is searched each
// time: an exportTo may name 250,000 namespaces, and an object may have many hosts.
const maxIndexed = 8

// An export has the hosts that have the same long list of namespaces in an exportTo.
type export struct {
	namespaces []string // sorted
	hosts      map[string]*Host
}

// has reports whether a sorted list has a namespace.
func has(namespaces []string, namespace string) bool {
	_, found := slices.BinarySearch(namespaces, namespace)
	return found
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
	if s.named == nil {
		s.named, s.inside, s.long = map[string]map[string]*Host{}, map[string]map[string]*Host{}, map[*string]*export{}
	}
	for _, c := range changes {
		s.remove(c.Old)
		s.add(c.New)
	}
}

// remove removes a host from the indexes; nil stands for no host.
func (s *Set) remove(h *Host) {
	h.audiences(
		func(namespace string) { removeInner(s.named, namespace, h.Key) },
		func(namespace string) { removeInner(s.inside, namespace, h.Key) },
		func(list []string) {
			if e := s.long[&list[0]]; e != nil {
				if delete(e.hosts, h.Key); len(e.hosts) == 0 {
					delete(s.long, &list[0])
				}
			}
		})
}

// add adds a host to the indexes; nil stands for no host.
func (s *Set) add(h *Host) {
	h.audiences(
		func(namespace string) { innerMap(s.named, namespace)[h.Key] = h },
		func(namespace string) { innerMap(s.inside, namespace)[h.Key] = h },
		func(list []string) {
			if s.long[&list[0]] == nil {
				s.long[&list[0]] = &export{list, map[string]*Host{}}
			}
			s.long[&list[0]].hosts[h.Key] = h
		})
}

// Special yields the hosts that v may see in another way than v.AtBase, in no particular order.
func (s *Set) Special(v *Viewer) iter.Seq[*Host] {
	return func(yield func(*Host) bool) {
		all := maps.Clone(s.named[v.Namespace])
		if all == nil {
			all = map[string]*Host{}
		}
		for _, e := range s.long {
			if has(e.namespaces, v.Namespace) {
				maps.Copy(all, e.hosts)
			}
		}
		if v.SeesOwn() {
			maps.Copy(all, s.inside[v.Namespace])
		}
		maps.Values(all)(yield)
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
	named, inside map[string][]HostChange
	long          map[*string]*exportChanges
}

// exportChanges are the changes of hosts with one list of namespaces in an exportTo.
type exportChanges struct {
	namespaces []string
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
	s := &Span{make([]HostChange, 0, len(last)), map[string][]HostChange{}, map[string][]HostChange{}, map[*string]*exportChanges{}}
	for _, key := range slices.Sorted(maps.Keys(last)) {
		c := HostChange{first[key], last[key]}
		if c.Old == nil && c.New == nil {
			continue
		}
		s.Changes = append(s.Changes, c)
		s.add(c, c.Old)
		s.add(c, c.New)
	}
	return s
}

// add adds a change by the namespaces that may see its old or its new host in another way; nil stands for no host.
func (s *Span) add(c HostChange, h *Host) {
	h.audiences(
		func(namespace string) { s.named[namespace] = appendOnce(s.named[namespace], c) },
		func(namespace string) { s.inside[namespace] = appendOnce(s.inside[namespace], c) },
		func(list []string) {
			if s.long[&list[0]] == nil {
				s.long[&list[0]] = &exportChanges{namespaces: list}
			}
			e := s.long[&list[0]]
			e.changes = appendOnce(e.changes, c)
		})
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
	if named := s.named[v.Namespace]; len(named) > 0 {
		lists = append(lists, named)
	}
	for _, e := range s.long {
		if has(e.namespaces, v.Namespace) {
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
	for _, indexed := range []map[string][]HostChange{s.named, s.inside} {
		for namespace := range indexed {
			if !yield(namespace) {
				return
			}
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
func (s *Span) Indexed() int { return len(s.named) + len(s.inside) }

// Reaches reports whether a viewer at the base b (see [Viewer.AtBase]) may see a change of the span. If b has a
// Sidecar, the Sidecar must show hosts of a namespace in which a host has changed.
func (s *Span) Reaches(b *Base) bool {
	if b.Sidecar.sidecar == nil {
		return len(s.Changes) > 0
	}
	return object.FromAny(b.Sidecar.sidecar.egress, s.inside)
}
