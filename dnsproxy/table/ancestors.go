package table

import (
	"hash/maphash"
	"maps"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// ancestors has the ancestors of all hosts' names, and of all short names that are derived from them. It maps an
// ancestor to the number of its children: names and other ancestors that are one label longer. The map is divided into
// parts, and the hash of an ancestor chooses its part. Parts are immutable, and tables share them.
type ancestors [partCount]map[wire.Name]uint32

// update returns the ancestors of hosts. a must be the ancestors of previous, and hosts may differ from previous only
// in the shards whose numbers are in changed.
func (a *ancestors) update(previous, hosts *hostSet, changed []int) ancestors {
	e := ancestorEditor{seed: previous.seed, result: *a}
	for _, i := range changed {
		// Names are added before others are removed, so that common ancestors stay.
		e.lacking(&previous.Cluster, &hosts.shards[i], &previous.shards[i], e.add)
		e.lacking(&previous.Cluster, &previous.shards[i], &hosts.shards[i], e.remove)
	}
	return e.result
}

func (a *ancestors) has(name wire.Name, seed maphash.Seed) bool {
	_, found := a[partOf(maphash.String(seed, string(name)))][name]
	return found
}

// An ancestorEditor makes ancestors from previous ones. It copies a part before it changes the part.
type ancestorEditor struct {
	seed   maphash.Seed
	result ancestors
	copied [partCount]bool // parts that were copied
}

// lacking calls edit for the FQDNs of the hosts of a shard that another shard does not have, and for the short names
// that are derived from them.
func (e *ancestorEditor) lacking(c *Cluster, s, other *shard, edit func(wire.Name)) {
	for h := range s.all {
		if same, found := other.find(maphash.String(e.seed, string(h.Name)), h.Name); found && same.derived() == h.derived() {
			continue
		}
		edit(h.Name)
		if h.derived() {
			var heads [3]wire.Name
			for _, name := range c.heads(h.Name, heads[:0]) {
				edit(name)
			}
		}
	}
}

// add adds the ancestors of name.
func (e *ancestorEditor) add(name wire.Name) {
	for name != wire.Root {
		name = name.Parent()
		children := e.part(name)
		if n := children[name]; n > 0 {
			children[name] = n + 1
			return // the ancestors of name are there already
		}
		name = wire.Name(strings.Clone(string(name))) // otherwise the map would keep the whole record in memory
		children[name] = 1
	}
}

// remove removes the ancestors of name that have no other child.
func (e *ancestorEditor) remove(name wire.Name) {
	for name != wire.Root {
		name = name.Parent()
		children := e.part(name)
		if n := children[name]; n > 1 {
			children[name] = n - 1
			return
		}
		delete(children, name)
	}
}

// part returns the part of an ancestor. If the part was not copied yet, it copies the part, so that it can be
// changed.
func (e *ancestorEditor) part(name wire.Name) map[wire.Name]uint32 {
	index := partOf(maphash.String(e.seed, string(name)))
	if !e.copied[index] {
		e.copied[index] = true
		if e.result[index] = maps.Clone(e.result[index]); e.result[index] == nil {
			e.result[index] = map[wire.Name]uint32{}
		}
	}
	return e.result[index]
}
