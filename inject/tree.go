package inject

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const mergeTag = "!!merge"

// clone returns a copy of a tree. Aliases of nodes in the tree become aliases of the copies. Aliases of other nodes stay as
// they are.
func clone(node *yaml.Node) *yaml.Node {
	copies := map[*yaml.Node]*yaml.Node{}
	var walk func(*yaml.Node) *yaml.Node
	walk = func(n *yaml.Node) *yaml.Node {
		c := *n
		copies[n] = &c
		c.Content = nil
		for _, child := range n.Content {
			c.Content = append(c.Content, walk(child))
		}
		return &c
	}
	root := walk(node)
	for _, c := range copies {
		if target := copies[c.Alias]; c.Alias != nil && target != nil {
			c.Alias = target
		}
	}
	return root
}

// expanded returns a copy of the node that an alias names, without anchors. The copy can be changed.
func expanded(alias *yaml.Node) *yaml.Node {
	c := clone(target(alias))
	dropAnchors(c)
	c.HeadComment, c.LineComment, c.FootComment = alias.HeadComment, alias.LineComment, alias.FootComment
	return c
}

// target returns the node that an alias names, or the node itself if it is no alias.
func target(node *yaml.Node) *yaml.Node {
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	return node
}

// dropAnchors removes the anchors of a tree. Aliases of nodes in the tree become copies of these nodes.
func dropAnchors(node *yaml.Node) {
	inside := map[*yaml.Node]bool{}
	visit(node, func(n *yaml.Node) { inside[n] = n.Anchor != "" })
	visit(node, func(n *yaml.Node) {
		for i, child := range n.Content {
			if child.Kind == yaml.AliasNode && inside[child.Alias] {
				n.Content[i] = expanded(child)
			}
		}
	})
	visit(node, func(n *yaml.Node) { n.Anchor = "" })
}

// visit calls f for each node of a tree, parents first.
func visit(node *yaml.Node, f func(*yaml.Node)) {
	f(node)
	for _, child := range node.Content {
		visit(child, f)
	}
}

// inlineMerges removes `<<` from a mapping: the keys that the mapping takes from other mappings become keys of the
// mapping itself.
func inlineMerges(m *yaml.Node) {
	var plain, merged []*yaml.Node
	for i := 0; i+1 < len(m.Content); i += 2 {
		if key, value := m.Content[i], m.Content[i+1]; key.Tag == mergeTag {
			merged = append(merged, sources(value)...)
		} else {
			plain = append(plain, key, value)
		}
	}
	if merged == nil {
		return
	}
	m.Content = plain
	for _, source := range merged {
		for i := 0; i+1 < len(source.Content); i += 2 {
			if key := source.Content[i]; find(m, key.Value) < 0 {
				m.Content = append(m.Content, key, source.Content[i+1])
			}
		}
	}
}

// sources returns copies of the mappings that the value of `<<` names, the most important first.
func sources(value *yaml.Node) []*yaml.Node {
	list := []*yaml.Node{value}
	if target(value).Kind == yaml.SequenceNode {
		list = target(value).Content
	}
	var mappings []*yaml.Node
	for _, n := range list {
		c := clone(target(n))
		dropAnchors(c)
		inlineMerges(c)
		mappings = append(mappings, c)
	}
	return mappings
}

// find returns the index of a key in the contents of a mapping, or -1.
func find(m *yaml.Node, key string) int {
	if m.Kind != yaml.MappingNode {
		return -1
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if k := target(m.Content[i]); k.Kind == yaml.ScalarNode && k.Value == key {
			return i
		}
	}
	return -1
}

// lookup returns the value of a key of m, or of a mapping from which m takes keys by `<<`; nil if the key is
// missing. The caller must not change the value.
func lookup(m *yaml.Node, key string) *yaml.Node {
	m = target(m)
	if i := find(m, key); i >= 0 {
		return target(m.Content[i+1])
	}
	for i := 0; i+1 < len(m.Content) && m.Kind == yaml.MappingNode; i += 2 {
		if m.Content[i].Tag != mergeTag {
			continue
		}
		list := []*yaml.Node{m.Content[i+1]}
		if source := target(list[0]); source.Kind == yaml.SequenceNode {
			list = source.Content
		}
		for _, source := range list {
			if v := lookup(source, key); v != nil {
				return v
			}
		}
	}
	return nil
}

// value returns the value of a key, nil if it is missing or null. The caller may change the value, because value replaces
// an alias by a copy.
func value(m *yaml.Node, key string) *yaml.Node {
	inlineMerges(m)
	i := find(m, key)
	if i < 0 {
		return nil
	}
	if m.Content[i+1].Kind == yaml.AliasNode {
		m.Content[i+1] = expanded(m.Content[i+1])
	}
	if v := m.Content[i+1]; v.ShortTag() != "!!null" {
		return v
	}
	return nil
}

// set sets a key of a mapping. A key that exists stays in its place. A new key is inserted in front of the key
// successor. If there is no such key, the new key comes last.
func set(m *yaml.Node, key, successor string, v *yaml.Node) {
	inlineMerges(m)
	if i := find(m, key); i >= 0 {
		m.Content[i+1] = v
		return
	}
	k := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}
	index := find(m, successor)
	if index < 0 {
		index = len(m.Content)
	}
	m.Content = slices.Insert(m.Content, index, k, v)
}

// remove removes a key.
func remove(m *yaml.Node, key string) {
	inlineMerges(m)
	if i := find(m, key); i >= 0 {
		m.Content = slices.Delete(m.Content, i, i+2)
	}
}

// ensure returns the value of a key. If the value is missing or null, ensure calls set with an empty value of the kind.
func ensure(m *yaml.Node, key, successor string, kind yaml.Kind) *yaml.Node {
	if v := value(m, key); v != nil {
		if len(v.Content) == 0 {
			v.Style &^= yaml.FlowStyle // as in `annotations: {}`
		}
		return v
	}
	v := &yaml.Node{Kind: kind, Tag: "!!map"}
	if kind == yaml.SequenceNode {
		v.Tag = "!!seq"
	}
	set(m, key, successor, v)
	return v
}

// elements returns the elements of a list, which the caller may change.
func elements(list *yaml.Node) []*yaml.Node {
	if list == nil {
		return nil
	}
	for i, element := range list.Content {
		if element.Kind == yaml.AliasNode {
			list.Content[i] = expanded(element)
		}
	}
	return list.Content
}

// nameOf returns the field `name` of an element of a list.
func nameOf(element *yaml.Node) string {
	if v := value(element, "name"); v != nil {
		return v.Value
	}
	return ""
}

// sameTree reports whether two trees have the same contents. If expand is true, an alias equals the node that it names.
func sameTree(a, b *yaml.Node, expand bool) bool {
	if expand {
		a, b = target(a), target(b)
	}
	if a.Kind != b.Kind || a.ShortTag() != b.ShortTag() || a.Value != b.Value || len(a.Content) != len(b.Content) {
		return false
	}
	for i := range a.Content {
		if !sameTree(a.Content[i], b.Content[i], expand) {
			return false
		}
	}
	return true
}

// text returns the text of a key, "" if the value is missing or no scalar. It changes nothing.
func text(m *yaml.Node, key string) string {
	if v := lookup(m, key); v != nil && v.Kind == yaml.ScalarNode && v.ShortTag() != "!!null" {
		return v.Value
	}
	return ""
}

// texts returns the keys of a map with their values.
func texts(m *yaml.Node) map[string]string {
	all := map[string]string{}
	if m != nil && m.Kind == yaml.MappingNode {
		inlineMerges(m)
		for i := 0; i+1 < len(m.Content); i += 2 {
			all[m.Content[i].Value] = text(m, m.Content[i].Value)
		}
	}
	return all
}

// elementOf returns the element with the given name, or nil if the list has no such element.
func elementOf(list *yaml.Node, name string) *yaml.Node {
	for _, element := range elements(list) {
		if nameOf(element) == name {
			return element
		}
	}
	return nil
}

// part returns the value at a path, nil if it is missing.
func part(node *yaml.Node, path string) *yaml.Node {
	for key := range strings.SplitSeq(path, "/") {
		if node == nil || node.Kind != yaml.MappingNode {
			return nil
		}
		node = value(node, key)
	}
	return node
}

// setPath sets the value at a path, or removes it if the value is nil. An equal value stays as it is.
func setPath(node *yaml.Node, path []string, v *yaml.Node) {
	key := path[0]
	if len(path) > 1 {
		next := value(node, key)
		if next == nil || next.Kind != yaml.MappingNode {
			if v == nil {
				return
			}
			next = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
			set(node, key, "", next)
		}
		setPath(next, path[1:], v)
		return
	}
	switch current := value(node, key); {
	case v == nil:
		remove(node, key)
	case current == nil || !sameTree(current, v, true):
		if current != nil {
			v.HeadComment, v.LineComment, v.FootComment = current.HeadComment, current.LineComment, current.FootComment
		}
		set(node, key, "", v)
	}
}
