package inject

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// A change gives trees other values. It has the children that each node had before it, or a part of it, changed; none for
// a node that was replaced.
type change map[*yaml.Node][]*yaml.Node

// apply gives a tree the value want. All that need not change stays, also aliases of nodes that get the same value. The
// tree of a document is changed in its order, so anchors change before their aliases.
func (c change) apply(n *yaml.Node, want any) {
	if current, err := valueOf(n); err == nil && reflect.DeepEqual(current, want) {
		return
	}
	object, isObject := want.(map[string]any)
	list, isList := want.([]any)
	switch {
	case isObject && n.Kind == yaml.MappingNode:
		c[n] = n.Content
		n.Content = c.mapping(n, object)
	case isList && n.Kind == yaml.SequenceNode:
		c[n] = n.Content
		n.Content = c.sequence(n, list)
	default:
		c[n] = nil
		next := newNode(want)
		next.Anchor, next.LineComment, next.Line, next.Column = n.Anchor, n.LineComment, n.Line, n.Column
		*n = *next
	}
	if len(c[n]) == 0 {
		n.Style &^= yaml.FlowStyle // as in `annotations: {}`
	}
}

// mapping returns the children of a mapping that gets the value want. What << adds to the mapping stays if it is right.
// Otherwise, keys of the mapping itself come in the place of <<.
func (c change) mapping(n *yaml.Node, want map[string]any) []*yaml.Node {
	own, others := map[string]bool{}, maps.Clone(want) // the keys that stay in the mapping itself, and the others
	for pair := range slices.Chunk(n.Content, 2) {
		key := target(pair[0]).Value
		if _, ok := want[key]; ok && !isMerge(pair[0]) {
			own[key] = true
			delete(others, key)
		}
	}
	var content []*yaml.Node
	for pair := range slices.Chunk(n.Content, 2) {
		key := target(pair[0]).Value
		switch {
		case own[key]:
			c.apply(pair[1], want[key])
			content = append(content, pair...)
		case isMerge(pair[0]):
			v, err := valueOf(pair[1])
			merged := mergedBy(v)
			maps.DeleteFunc(merged, func(key string, _ any) bool { return own[key] })
			if err != nil || !reflect.DeepEqual(merged, others) {
				pair = newNode(others).Content
			}
			content = append(content, pair...)
			others = nil
		}
	}
	return append(content, newNode(others).Content...)
}

// sequence returns the children of a sequence that gets the value want. Elements are the same if they have the same name,
// or no name and the same index.
func (c change) sequence(n *yaml.Node, want []any) []*yaml.Node {
	identity := func(i int, v any) string { return cmp.Or(nameOf(v), strconv.Itoa(i)) }
	places := map[string]int{}
	for i, element := range n.Content {
		v, _ := valueOf(element) // the whole document has a value
		places[identity(i, v)] = i
	}
	content, end := make([]*yaml.Node, len(want)), len(n.Content)
	for i, v := range slices.Backward(want) { // injection moves its additions to the front
		if place, ok := places[identity(i, v)]; ok && place < end {
			content[i], end = n.Content[place], place
		}
	}
	for i, v := range want {
		if content[i] == nil {
			content[i] = newNode(v)
		}
		c.apply(content[i], v)
	}
	return content
}

// newNode returns the tree of a value. The name of an object comes first.
func newNode(v any) *yaml.Node {
	n := new(yaml.Node)
	_ = n.Encode(v) // values have a form in YAML
	nameFirst(n)
	return n
}

func nameFirst(n *yaml.Node) {
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && child.Value == "name" {
			n.Content = slices.Concat(n.Content[i:i+2], n.Content[:i], n.Content[i+2:])
		}
		nameFirst(child)
	}
}
