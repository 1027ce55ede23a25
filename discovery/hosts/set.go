package hosts

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/object"
)

// A Set has the hosts of one time, as changes have made them. The zero value has none.
type Set struct {
	shards [digest.Count][]*Host // sorted by key; a change replaces the slice
	// The hosts that a namespace may see in another way than others do: those with an exportTo that names it,
	// and those that have a claim of one of its objects.
	exported, inside map[string]map[string]*Host
}

// Shards returns the hosts by shard, sorted by key. They stay as they are, whatever follows.
func (s *Set) Shards() [digest.Count][]*Host { return s.shards }

// Next returns the hosts by shard after changes.
func (s *Set) Next(changes []HostChange) [digest.Count][]*Host {
	next, byShard := s.shards, map[int][]HostChange{}
	for _, c := range changes {
		at := digest.ShardOf(c.Key())
		byShard[at] = append(byShard[at], c)
	}
	for at, some := range byShard {
		next[at] = merged(next[at], some)
	}
	return next
}

// Apply puts changes to use, with the result of Next.
func (s *Set) Apply(changes []HostChange, next [digest.Count][]*Host) {
	s.shards = next
	if s.exported == nil {
		s.exported, s.inside = map[string]map[string]*Host{}, map[string]map[string]*Host{}
	}
	for _, c := range changes {
		for namespace := range c.Old.exportedTo {
			removeInner(s.exported, namespace, c.Old.Key)
		}
		for namespace := range c.Old.namespaces {
			removeInner(s.inside, namespace, c.Old.Key)
		}
		for namespace := range c.New.exportedTo {
			innerMap(s.exported, namespace)[c.New.Key] = c.New
		}
		for namespace := range c.New.namespaces {
			innerMap(s.inside, namespace)[c.New.Key] = c.New
		}
	}
}

// merged returns the hosts after changes, which it sorts. Both have each key once.
func merged(hosts []*Host, changes []HostChange) []*Host {
	slices.SortFunc(changes, func(a, b HostChange) int { return strings.Compare(a.Key(), b.Key()) })
	next := make([]*Host, 0, len(hosts)+len(changes))
	for _, c := range changes {
		at, found := slices.BinarySearchFunc(hosts, c.Key(), func(h *Host, key string) int { return strings.Compare(h.Key, key) })
		next = append(next, hosts[:at]...)
		if c.New != nil {
			next = append(next, c.New)
		}
		if hosts = hosts[at:]; found {
			hosts = hosts[1:]
		}
	}
	return slices.Clip(append(next, hosts...))
}

// Special yields the hosts that a viewer may see in another way than its base, in no order.
func (s *Set) Special(v *Viewer) iter.Seq[*Host] {
	return func(yield func(*Host) bool) {
		exported := s.exported[v.Namespace]
		for _, h := range exported {
			if !yield(h) {
				return
			}
		}
		if !v.SeesOwn() {
			return
		}
		for key, h := range s.inside[v.Namespace] {
			if _, twice := exported[key]; !twice && !yield(h) {
				return
			}
		}
	}
}

// exportedTo yields the namespaces that an exportTo of the host, or of the one that it is an alias of, names. A
// namespace may come twice.
func (h *Host) exportedTo(yield func(string) bool) {
	for _, c := range h.allClaims() {
		for _, namespace := range c.exportTo.Namespaces {
			if !yield(namespace) {
				return
			}
		}
	}
}

// namespaces yields the namespaces of the objects that the host is of. A namespace may come twice.
func (h *Host) namespaces(yield func(string) bool) {
	for _, c := range h.allClaims() {
		if !yield(c.namespace) {
			return
		}
	}
}

// allClaims returns the claims to the host, and those to the one that it is an alias of.
func (h *Host) allClaims() []*claim {
	switch {
	case h == nil:
		return nil
	case h.target == nil:
		return h.claims
	}
	return slices.Concat(h.claims, h.target.claims)
}

// A Span is what several changes have done to the hosts.
type Span struct {
	Changes []HostChange // sorted by key
	// The same changes by the namespaces that may see them in another way than others do, see [Set].
	exported, inside map[string][]HostChange
}

// NewSpan returns the span of changes, which follow one another.
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
	s := &Span{Changes: make([]HostChange, 0, len(last)), exported: map[string][]HostChange{}, inside: map[string][]HostChange{}}
	for _, key := range slices.Sorted(maps.Keys(last)) {
		c := HostChange{first[key], last[key]}
		if c.Old == nil && c.New == nil {
			continue
		}
		s.Changes = append(s.Changes, c)
		c.note(s.exported, (*Host).exportedTo)
		c.note(s.inside, (*Host).namespaces)
	}
	return s
}

// note adds the change to those of the namespaces that the host has, before or after it.
func (c HostChange) note(to map[string][]HostChange, namespaces func(*Host, func(string) bool)) {
	for _, h := range []*Host{c.Old, c.New} {
		namespaces(h, func(namespace string) bool {
			all := to[namespace]
			if n := len(all); n == 0 || all[n-1] != c {
				to[namespace] = append(all, c)
			}
			return true
		})
	}
}

// Special returns the changes that a viewer may see in another way than its base, sorted by key.
func (s *Span) Special(v *Viewer) []HostChange {
	exported := s.exported[v.Namespace]
	if !v.SeesOwn() {
		return exported
	}
	inside := s.inside[v.Namespace]
	if len(exported) == 0 {
		return inside
	}
	all := slices.Concat(exported, inside)
	slices.SortFunc(all, func(a, b HostChange) int { return strings.Compare(a.Key(), b.Key()) })
	return slices.Compact(all)
}

// Namespaces yields the namespaces for which Special may return changes. A namespace may come twice.
func (s *Span) Namespaces(yield func(string) bool) {
	for _, some := range []map[string][]HostChange{s.exported, s.inside} {
		for namespace := range some {
			if !yield(namespace) {
				return
			}
		}
	}
}

// AllNamespaces returns how many namespaces Namespaces yields.
func (s *Span) AllNamespaces() int { return len(s.exported) + len(s.inside) }

// Reaches reports whether a base may see a change: its Sidecar, if it has one, shows hosts of the namespaces.
func (s *Span) Reaches(b *Base) bool {
	if b.Sidecar.is == nil {
		return len(s.Changes) > 0
	}
	return object.FromAny(b.Sidecar.is.egress, s.inside)
}
