package inject

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf16"

	"go.yaml.in/yaml/v3"
)

// withoutSurrogates returns JSON in which characters that are written as two escapes, such as
// \ud83d\ude00, are written plainly, because YAML has no such escapes.
func withoutSurrogates(text []byte) []byte {
	var out []byte
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' || i+1 == len(text) {
			out = append(out, text[i])
			continue
		}
		if r := utf16.DecodeRune(escape(text[i:]), escape(text[min(i+6, len(text)):])); r != '\uFFFD' {
			out = append(out, string(r)...)
			i += 11
			continue
		}
		out = append(out, text[i], text[i+1])
		i++
	}
	return out
}

// escape returns the number in an escape that a text begins with, or 0.
func escape(text []byte) rune {
	if len(text) < 6 || !bytes.HasPrefix(text, []byte(`\u`)) {
		return 0
	}
	n, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return 0
	}
	return rune(n)
}

// json returns a tree as JSON with the indentation of the document.
func (d *document) json(root *yaml.Node) []byte {
	var w jsonWriter
	for line := range bytes.Lines(bytes.TrimSpace(d.body)) {
		if text := bytes.TrimLeft(line, " \t"); len(text) < len(line) {
			w.indent = string(line[:len(line)-len(text)])
			break
		}
	}
	w.node(root.Content[0], "")
	w.WriteByte('\n')
	return w.Bytes()
}

// A jsonWriter writes a tree as JSON, in its order.
type jsonWriter struct {
	bytes.Buffer
	indent string // empty writes one line
}

// node writes a tree, whose first line is indented already.
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
	_ = encoder.Encode(s) // a string in memory
	w.Truncate(w.Len() - 1)
}
