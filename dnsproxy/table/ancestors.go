package table

import (
	"hash/maphash"
	"maps"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// ancestors has the ancestors of all hosts' names, and of all short names that are derived from them. It maps an
// ancestor to the number of its children: names and other ancestors that are one label longer. The hash of an
// ancestor chooses its part. Parts are immutable, and tables share them.
type ancestors [partCount]map[wire.Name]uint32

// newAncestors returns the ancestors of hosts.
func newAncestors(hosts *hostSet) *ancestors {
	e := ancestorEditor{seed: hosts.seed}
	for h := range hosts.all {
		e.host(&hosts.Cluster, &h, e.add)
	}
	return &e.result
}

// next returns the ancestors of the hosts in after. after differs from before in the shards whose numbers are in
// changed. The result is nil if a is nil.
func (a *ancestors) next(before, after *hostSet, changed []int) *ancestors {
	if a == nil {
		return nil
	}
	e := ancestorEditor{seed: before.seed, result: *a}
	for _, i := range changed {
		e.replace(&before.Cluster, &before.shards[i], &after.shards[i])
	}
	return &e.result
}

func (a *ancestors) has(name wire.Name, seed maphash.Seed) bool {
	_, found := a[partOf(maphash.String(seed, string(name)))][name]
	return found
}

// An ancestorEditor makes ancestors from previous ones. It copies a part before it changes the part.
type ancestorEditor struct {
	seed   maphash.Seed
	result ancestors
	own    [partCount]bool // parts that were copied
}

// replace replaces the hosts of a shard by the hosts of another shard. Both shards have their hosts
// in the order of their names.
func (e *ancestorEditor) replace(c *Cluster, before, after *shard) {
	was, is := before.records, after.records
	for len(was)+len(is) > 0 {
		var x, y Host
		switch {
		case len(was) > 0 && len(is) > 0:
			x, y = viewHost(was), viewHost(is)
		case len(was) > 0:
			x = viewHost(was)
		default:
			y = viewHost(is)
		}
		removed := y.Name == "" || x.Name != "" && x.Name <= y.Name
		added := x.Name == "" || y.Name != "" && y.Name <= x.Name
		if removed {
			was = was[recordLen(was):]
		}
		if added {
			is = is[recordLen(is):]
		}
		if removed && added && x.derived() == y.derived() {
			continue // the same names
		}
		if added { // added before the other is removed, so that common ancestors stay
			e.host(c, &y, e.add)
		}
		if removed {
			e.host(c, &x, e.remove)
		}
	}
}

// host calls edit for the FQDN of a host and the short names that are derived from it.
func (e *ancestorEditor) host(c *Cluster, h *Host, edit func(wire.Name)) {
	edit(h.Name)
	if h.derived() {
		var heads [3]wire.Name
		for _, name := range c.heads(h.Name, heads[:0]) {
			edit(name)
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
	at := partOf(maphash.String(e.seed, string(name)))
	if !e.own[at] {
		e.own[at] = true
		if e.result[at] = maps.Clone(e.result[at]); e.result[at] == nil {
			e.result[at] = map[wire.Name]uint32{}
		}
	}
	return e.result[at]
}
