package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// readJSON returns the tree of a text in JSON that has at most maxValues values, and a depth of at most maxDepth. A YAML
// parser would misread the text: it takes some characters, such as U+0085 and U+2028, for line breaks, and refuses others.
func readJSON(text []byte, maxValues, maxDepth int) (*yaml.Node, error) {
	r := jsonReader{Decoder: json.NewDecoder(bytes.NewReader(text)), text: text, line: 1, maxValues: maxValues, maxDepth: maxDepth}
	r.UseNumber()
	node, err := r.value(0)
	if err == nil && r.More() {
		err = errors.New("want one object in JSON")
	}
	return node, err
}

// A jsonReader reads trees in JSON.
type jsonReader struct {
	*json.Decoder
	text                []byte
	read, line          int // the number of bytes that were read, and the line in which they end
	values              int
	maxValues, maxDepth int
}

// value reads a value at a depth.
func (r *jsonReader) value(depth int) (*yaml.Node, error) {
	if r.values++; r.values > r.maxValues || depth > r.maxDepth {
		return nil, fmt.Errorf("want at most %d values and a depth of at most %d", r.maxValues, r.maxDepth)
	}
	token, err := r.Token()
	if err != nil {
		return nil, err
	}
	end := int(r.InputOffset())
	r.line += bytes.Count(r.text[r.read:end], []byte{'\n'})
	r.read = end
	node := &yaml.Node{Kind: yaml.ScalarNode, Line: r.line}
	switch v := token.(type) {
	case json.Delim:
		return node, r.list(node, v, depth)
	case string:
		node.Tag, node.Value = "!!str", v
	case json.Number:
		node.Tag, node.Value = "!!int", v.String()
		if strings.ContainsAny(node.Value, ".eE") {
			node.Tag = "!!float"
		}
	case bool:
		node.Tag, node.Value = "!!bool", strconv.FormatBool(v)
	default:
		node.Tag, node.Value = "!!null", "null"
	}
	return node, nil
}

// list reads a list or an object after its bracket.
func (r *jsonReader) list(node *yaml.Node, bracket json.Delim, depth int) error {
	node.Kind, node.Tag = yaml.SequenceNode, "!!seq"
	if bracket == '{' {
		node.Kind, node.Tag = yaml.MappingNode, "!!map"
	}
	for r.More() {
		child, err := r.value(depth + 1)
		if err != nil {
			return err
		}
		node.Content = append(node.Content, child)
	}
	_, err := r.Token() // the closing bracket
	return err
}

// ambiguous matches scalars that are texts in YAML 1.2 but not in YAML 1.1, such as yes. encode quotes them.
var ambiguous = regexp.MustCompile(`^(?:[yY]|[nN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)$`)

// encode returns the tree of v, which is a value of one of Kubernetes' types, a text, or a list of these. It writes v
// as JSON first, because [yaml.Node.Encode] does not know the names that the fields have in JSON.
func encode(v any) *yaml.Node {
	var node *yaml.Node
	text, err := json.Marshal(v)
	if err == nil {
		node, err = readJSON(text, math.MaxInt, math.MaxInt)
	}
	if err != nil {
		panic(fmt.Sprintf("encoding a %T: %v", v, err))
	}
	visit(node, func(n *yaml.Node) {
		n.Line = 0
		switch {
		case n.Tag == "!!str" && ambiguous.MatchString(n.Value):
			n.Style = yaml.DoubleQuotedStyle
		case n.Kind != yaml.ScalarNode && len(n.Content) == 0:
			n.Style = yaml.FlowStyle
		}
	})
	return node
}

// A jsonWriter writes a tree as JSON, in its order.
type jsonWriter struct {
	bytes.Buffer
	indent string // empty writes one line
}

// node writes a tree. margin is the indentation of its lines after the first one.
func (w *jsonWriter) node(n *yaml.Node, margin string) {
	n = target(n)
	inner := margin + w.indent
	switch {
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str":
		w.text(n.Value)
	case n.Kind == yaml.ScalarNode:
		w.WriteString(n.Value) // a number, true, false or null
	case n.Kind == yaml.SequenceNode:
		w.list("[]", margin, len(n.Content), func(i int) { w.node(n.Content[i], inner) })
	case n.Kind == yaml.MappingNode:
		w.list("{}", margin, len(n.Content)/2, func(i int) {
			w.text(n.Content[2*i].Value)
			w.WriteByte(':')
			if w.indent != "" {
				w.WriteByte(' ')
			}
			w.node(n.Content[2*i+1], inner)
		})
	}
}

// list writes elements between brackets, each on a line if there is an indentation.
func (w *jsonWriter) list(brackets, margin string, count int, element func(i int)) {
	w.WriteByte(brackets[0])
	for i := range count {
		if i > 0 {
			w.WriteByte(',')
		}
		if w.indent != "" {
			w.WriteString("\n" + margin + w.indent)
		}
		element(i)
	}
	if count > 0 && w.indent != "" {
		w.WriteString("\n" + margin)
	}
	w.WriteByte(brackets[1])
}

// text writes a string. Unlike json.Marshal it leaves <, > and & as they are.
func (w *jsonWriter) text(s string) {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(s) // cannot fail: the string and the buffer are in memory
	w.Truncate(w.Len() - 1)
}
