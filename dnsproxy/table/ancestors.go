package table

import "github.com/nametap/nametap/dnsproxy/wire"

// HasBelow reports whether name is an ancestor of a host's name, a wildcard or a short
// name. Such a name exists without records (RFC 8020, RFC 4592). The first call for a table
// walks all its hosts.
func (t *Table) HasBelow(name wire.Name) bool {
	t.descended.Do(t.findAncestors)
	_, found := t.ancestors[name]
	return found
}

// findAncestors fills ancestors.
func (t *Table) findAncestors() {
	t.ancestors = map[wire.Name]struct{}{}
	add := func(name wire.Name) {
		for name != wire.Root {
			name = name.Parent()
			if _, known := t.ancestors[name]; known {
				return
			}
			t.ancestors[name] = struct{}{}
		}
	}
	var heads [3]wire.Name
	for h := range t.all {
		add(h.Name)
		if h.derived() {
			for _, name := range t.Cluster.heads(h.Name, heads[:0]) {
				add(name)
			}
		}
	}
	for name := range t.aliases {
		add(name)
	}
}
