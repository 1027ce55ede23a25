package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"

	"go.yaml.in/yaml/v3"
)

const (
	// maxAliased is how many values the aliases of a document may add to the document.
	maxAliased = 500_000
	// maxNesting is the depth of a document. The value of an alias that is inside what it names would have no end.
	maxNesting = 1000
)

// parseYAML returns the tree of the only value of a text; nil if there is none. A second value, such as another
// object in JSON, is an error, because it would be lost.
func parseYAML(text []byte) (*yaml.Node, error) {
	decoder, document := yaml.NewDecoder(bytes.NewReader(text)), new(yaml.Node)
	switch err := decoder.Decode(document); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, err
	}
	err := decoder.Decode(new(yaml.Node))
	if errors.Is(err, io.EOF) {
		return document.Content[0], nil
	}
	if err == nil {
		err = lineError(document, "more than one object")
	}
	return nil, fmt.Errorf("%w: write a line --- before a second one", err)
}

// parseJSON returns the tree of a text in JSON that has at most maxValues values and the depth maxDepth. A YAML parser
// would misread the text: it takes some characters, such as U+0085 and U+2028, for line breaks, and refuses others.
func parseJSON(text []byte, maxValues, maxDepth int) (*yaml.Node, error) {
	decoder, values := json.NewDecoder(bytes.NewReader(text)), 0
	decoder.UseNumber()
	var parse func(depth int) (*yaml.Node, error)
	parse = func(depth int) (*yaml.Node, error) {
		if values++; values > maxValues || depth > maxDepth {
			return nil, fmt.Errorf("want at most %d values and a depth of at most %d", maxValues, maxDepth)
		}
		token, err := decoder.Token()
		n := &yaml.Node{Kind: yaml.ScalarNode, Line: 1}
		switch token := token.(type) {
		case string:
			n.Tag, n.Value, n.Style = "!!str", token, yaml.DoubleQuotedStyle
		case nil:
			n.Tag, n.Value = "!!null", "null"
		case json.Delim:
			n.Kind, n.Tag = yaml.SequenceNode, "!!seq"
			if token == '{' {
				n.Kind, n.Tag = yaml.MappingNode, "!!map"
			}
			for err == nil && decoder.More() {
				var child *yaml.Node
				child, err = parse(depth + 1)
				n.Content = append(n.Content, child)
			}
			if err == nil {
				_, err = decoder.Token() // the closing bracket
			}
		default:
			n.Value = fmt.Sprint(token) // a number, true or false
		}
		return n, err
	}
	n, err := parse(0)
	if err == nil && decoder.More() {
		err = errors.New("want one object in JSON")
	}
	return n, err
}

// formatJSON returns a tree as JSON in one line.
func formatJSON(n *yaml.Node) []byte {
	var children [][]byte
	for _, child := range n.Content {
		children = append(children, formatJSON(child))
	}
	switch n.Kind {
	case yaml.SequenceNode:
		return slices.Concat([]byte{'['}, bytes.Join(children, []byte{','}), []byte{']'})
	case yaml.MappingNode:
		var members [][]byte
		for member := range slices.Chunk(children, 2) {
			members = append(members, bytes.Join(member, []byte{':'}))
		}
		return slices.Concat([]byte{'{'}, bytes.Join(members, []byte{','}), []byte{'}'})
	case yaml.ScalarNode:
		if n.Tag == "!!str" {
			return writeJSON(n.Value)
		}
	}
	return []byte(n.Value)
}

// writeJSON returns a value as JSON. Unlike json.Marshal it leaves <, > and & as they are.
func writeJSON(v any) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(v) // cannot fail: v comes from JSON or YAML, or has one of Kubernetes' types
	return bytes.TrimSuffix(out.Bytes(), []byte{'\n'})
}

// valueOf returns the value of a tree, as kubectl reads it: nil, bool, int64, float64, string, []any or map[string]any. It
// has no parts in common with other values.
func valueOf(root *yaml.Node) (any, error) { return new(valueReader).value(root, 0, false) }

// A valueReader is the state of one call of valueOf.
type valueReader struct {
	aliased int // the number of values that aliases have added
}

// value returns the value of a tree at a depth. aliased is true in the value of an alias.
func (r *valueReader) value(n *yaml.Node, depth int, aliased bool) (any, error) {
	if aliased {
		r.aliased++
	}
	switch {
	case depth > maxNesting:
		return nil, lineError(n, "want a depth of at most %d, and no alias inside what it names", maxNesting)
	case r.aliased > maxAliased:
		return nil, lineError(n, "the aliases of the document add more than %d values: write out what they name", maxAliased)
	case n.Kind == yaml.AliasNode:
		return r.value(n.Alias, depth+1, true)
	case n.Kind == yaml.MappingNode:
		return r.mapping(n, depth, aliased)
	case n.Kind == yaml.ScalarNode:
		return scalar(n), nil
	}
	list := make([]any, len(n.Content))
	for i, element := range n.Content {
		var err error
		if list[i], err = r.value(element, depth+1, aliased); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// mapping is the method value for a mapping.
func (r *valueReader) mapping(n *yaml.Node, depth int, aliased bool) (any, error) {
	own, all, merged := map[string]any{}, map[string]any{}, false
	for pair := range slices.Chunk(n.Content, 2) {
		key := target(pair[0])
		v, err := r.value(pair[1], depth+1, aliased)
		if err != nil {
			return nil, err
		}
		_, twice := own[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			return nil, lineError(key, "want a text as the key")
		case twice, merged && isMerge(key):
			return nil, lineError(key, "the key %.100q is in this object twice: remove one of them", key.Value)
		case !isMerge(key):
			own[key.Value] = v
		default:
			if merged, all = true, mergedBy(v); all == nil {
				return nil, lineError(key, "want a mapping as the value of <<")
			}
		}
	}
	maps.Copy(all, own)
	return all, nil
}

// mergedBy returns what a value of the key << adds to a mapping, nil for another value. The first of several mappings precedes.
func mergedBy(v any) map[string]any {
	merged := map[string]any{}
	sources, ok := v.([]any)
	if !ok {
		sources = []any{v}
	}
	for _, source := range slices.Backward(sources) {
		m, ok := source.(map[string]any)
		if !ok {
			return nil
		}
		maps.Copy(merged, m)
	}
	return merged
}

func isMerge(key *yaml.Node) bool { return key.ShortTag() == "!!merge" }

// target returns the node that an alias names, or the node itself if it is no alias.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// lineError returns an error in the form of the YAML library's errors.
func lineError(n *yaml.Node, format string, values ...any) error {
	return fmt.Errorf("yaml: line %d: %s", n.Line, fmt.Sprintf(format, values...))
}

// oldBool matches what kubectl, which reads YAML 1.1, takes for true or false.
var oldBool = regexp.MustCompile(`^(?:(y|Y|yes|Yes|YES|on|On|ON)|n|N|no|No|NO|off|Off|OFF)$`)

// scalar returns the value of a scalar.
func scalar(n *yaml.Node) any {
	tag := n.ShortTag()
	if tag == "!!null" {
		return nil
	}
	if match := oldBool.FindStringSubmatch(n.Value); match != nil && tag == "!!str" && n.Style == 0 {
		return match[1] != ""
	}
	var v any
	if slices.Contains([]string{"!!int", "!!float", "!!bool"}, tag) && n.Decode(&v) == nil {
		switch v := v.(type) {
		case bool:
			return v
		case int:
			return int64(v)
		case uint64:
			return float64(v)
		case float64:
			if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
				return int64(v)
			}
			if !math.IsInf(v, 0) && !math.IsNaN(v) { // as JSON has no such numbers
				return v
			}
		}
	}
	return n.Value
}
