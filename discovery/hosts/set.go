package hosts

import (
	"maps"
	"slices"
	"strings"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/object"
)

// Shards has all hosts by shard, sorted by key. It does not change.
type Shards [digest.Count][]*Host

// After returns the hosts after changes.
func (s *Shards) After(changes []HostChange) *Shards {
	next, byShard := *s, map[int][]HostChange{}
	for _, c := range changes {
		shard := digest.ShardOf(c.Key())
		byShard[shard] = append(byShard[shard], c)
	}
	for shard, some := range byShard {
		next[shard] = merged(next[shard], some)
	}
	return &next
}

// merged returns hosts with changes applied. Both are sorted by key, and have each key only once.
func merged(hosts []*Host, changes []HostChange) []*Host {
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

// Special says in which shards there are hosts that a namespace may see in another way than other namespaces do. Make
// one with [NewSpecial].
type Special struct {
	// The number of these hosts in a shard, by namespace and shard. See [Host.audiences].
	named, inside map[string]map[int]int
}

// maxIndexed is the length of the longest exportTo whose namespaces count. A longer one counts as all namespaces: an
// exportTo may name 250,000 namespaces, and an object may have many hosts.
const maxIndexed = 8

// NewSpecial returns a Special for no hosts.
func NewSpecial() *Special { return &Special{map[string]map[int]int{}, map[string]map[int]int{}} }

// NewTouched returns a Special for hosts before and after changes.
func NewTouched(changes []HostChange) *Special {
	s := NewSpecial()
	for _, c := range changes {
		s.count(c.Old, 1)
		s.count(c.New, 1)
	}
	return s
}

// Follow follows changes of the hosts.
func (s *Special) Follow(changes []HostChange) {
	for _, c := range changes {
		s.count(c.Old, -1)
		s.count(c.New, 1)
	}
}

// count adds n to the number of hosts in the shard of a host; nil stands for no host.
func (s *Special) count(h *Host, n int) {
	if h == nil {
		return
	}
	shard := digest.ShardOf(h.Key)
	add := func(to map[string]map[int]int, namespace string) {
		setInner(to, namespace, shard, to[namespace][shard]+n)
	}
	h.audiences(
		func(namespace string) { add(s.named, namespace) },
		func(namespace string) { add(s.inside, namespace) })
}

// Shards returns the shards with a host that v may see in another way than v.AtBase, in no particular order. A shard may
// come more than once.
func (s *Special) Shards(v *Viewer) (shards []int) {
	shards = slices.AppendSeq(slices.AppendSeq(shards, maps.Keys(s.named[v.Namespace])), maps.Keys(s.named[""]))
	if v.SeesOwn() {
		shards = slices.AppendSeq(shards, maps.Keys(s.inside[v.Namespace]))
	}
	return shards
}

// Reaches reports whether a viewer at the base b (see [Viewer.AtBase]) may see one of the hosts. If b has a Sidecar, the
// Sidecar must show hosts of a namespace that has one of them.
func (s *Special) Reaches(b *Base) bool {
	return b.Sidecar.sidecar == nil || object.FromAny(b.Sidecar.sidecar.egress, s.inside)
}
