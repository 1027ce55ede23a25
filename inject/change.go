package inject

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// A change gives the tree of a document another value. It has the new values of the nodes with an anchor that have changed:
// their aliases have these values, too.
type change map[*yaml.Node]any

// apply gives a tree that has the value before the value want. All that need not change stays, also aliases of nodes that get
// the same value. The tree of a document is changed in its order, so anchors change before their aliases.
func (c change) apply(n *yaml.Node, before, want any) {
	if now, changed := c[n.Alias]; changed {
		before = now
	}
	same := reflect.DeepEqual(before, want)
	if same && (n.Kind == yaml.AliasNode || !c.reaches(n)) {
		return
	}
	oldObject, _ := before.(map[string]any)
	object, isObject := want.(map[string]any)
	oldList, _ := before.([]any)
	list, isList := want.([]any)
	if len(n.Content) == 0 {
		n.Style &^= yaml.FlowStyle // as in `annotations: {}`
	}
	switch {
	case isObject && n.Kind == yaml.MappingNode:
		n.Content = c.mapping(n, oldObject, object)
	case isList && n.Kind == yaml.SequenceNode && len(oldList) == len(n.Content):
		n.Content = c.sequence(n, oldList, list)
	case !same:
		next := newNode(want)
		next.Anchor, next.LineComment = n.Anchor, n.LineComment
		*n = *next
	}
	if n.Anchor != "" {
		c[n] = want
	}
}

// mapping returns the children of a mapping that gets the value want. What << adds to it becomes keys of its own.
func (c change) mapping(n *yaml.Node, before, want map[string]any) []*yaml.Node {
	others, content := maps.Clone(want), []*yaml.Node{}
	for pair := range slices.Chunk(n.Content, 2) {
		key := cmp.Or(pair[0].Alias, pair[0]).Value
		if v, stays := want[key]; stays {
			c.apply(pair[1], before[key], v)
			if pair[1].Style&yaml.FlowStyle == 0 && len(pair[1].Content) > 0 { // the library writes no comment beside it
				pair[0].LineComment = cmp.Or(pair[0].LineComment, pair[1].LineComment)
			}
			content = append(content, pair...)
			delete(others, key)
		}
	}
	return append(content, newNode(others).Content...)
}

// reaches reports whether a tree has an alias whose value has changed.
func (c change) reaches(n *yaml.Node) bool {
	_, changed := c[n.Alias]
	return changed || slices.ContainsFunc(n.Content, c.reaches)
}

// sequence returns the children of a sequence that gets the value want. Elements are the same if they have the same name,
// or no name and the same index.
func (c change) sequence(n *yaml.Node, before, want []any) []*yaml.Node {
	identity := func(i int, v any) string { return cmp.Or(nameOf(v), strconv.Itoa(i)) }
	places := map[string]int{}
	for i, v := range before {
		places[identity(i, v)] = i
	}
	content, end := make([]*yaml.Node, len(want)), len(before)
	for i, v := range slices.Backward(want) { // injection moves its additions to the front
		if place, ok := places[identity(i, v)]; ok && place < end {
			content[i], end = n.Content[place], place
		}
	}
	for i, v := range want {
		if content[i] == nil {
			content[i] = newNode(v)
			continue
		}
		c.apply(content[i], before[places[identity(i, v)]], v)
	}
	return content
}
