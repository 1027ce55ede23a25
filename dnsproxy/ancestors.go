package dnsproxy

// hasBelow reports whether a name is an ancestor of a host's name, of a wildcard or of a
// short name. Such a name exists (RFC 8020, RFC 4592). The first call for a table takes
// as long as a look at all its hosts.
func (t *Table) hasBelow(name wireName) bool {
	t.descended.Do(t.findAncestors)
	_, found := t.ancestors[name]
	return found
}

// findAncestors fills ancestors.
func (t *Table) findAncestors() {
	t.ancestors = map[wireName]struct{}{}
	add := func(name wireName) {
		for name != rootName {
			name = name.parent()
			if _, known := t.ancestors[name]; known {
				return
			}
			t.ancestors[name] = struct{}{}
		}
	}
	var heads [3]wireName
	for h := range t.all {
		add(h.name)
		if h.derived() {
			for _, name := range t.cluster.heads(h.name, heads[:0]) {
				add(name)
			}
		}
	}
	for name := range t.aliases {
		add(name)
	}
}
