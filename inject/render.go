package inject

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// render returns a changed document as text. It reads the text again: an error is better than a
// manifest that says something else.
func (d *document) render(root *yaml.Node) ([]byte, error) {
	if json.Valid(d.body) {
		return d.checked(d.json(root), root)
	}
	spaces, compact := indentation(d.root)
	next, err := encodeText(root, spaces, compact)
	if err != nil {
		return d.body, fmt.Errorf("line %d: writing the document: %w", d.line+1, err)
	}
	end := ""
	if line := lastLine(d.body); strings.HasPrefix(line, "...") {
		end = line
	}
	next += end
	raw := strings.ReplaceAll(string(d.body), "\r\n", "\n")
	ending := func(text string) []byte {
		if len(raw) < len(d.body) {
			text = strings.ReplaceAll(text, "\n", "\r\n")
		}
		return []byte(text)
	}
	// With the lines of the document as they are, if that says the same.
	if base, err := encodeText(d.root, spaces, compact); err == nil {
		if merged, ok := merge(withNewline(raw), base+end, next); ok {
			if text, err := d.checked(ending(merged), root); err == nil {
				return text, nil
			}
		}
	}
	return d.checked(ending(next), root)
}

// checked returns a text that says what the tree says, or an error.
func (d *document) checked(text []byte, root *yaml.Node) ([]byte, error) {
	again, err := d.read(text)
	if err != nil {
		return d.body, fmt.Errorf("line %d: the document cannot be written as YAML again; simplify it, for example its anchors: %w", d.line+1, err)
	}
	if again == nil || !same(root.Content[0], again.Content[0], false) {
		return d.body, fmt.Errorf("line %d: the document cannot be written as YAML again without changes elsewhere; simplify it, for example its anchors", d.line+1)
	}
	return text, nil
}

// encodeText returns a tree as YAML.
func encodeText(root *yaml.Node, spaces int, compact bool) (string, error) {
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(spaces)
	if compact {
		encoder.CompactSeqIndent()
	}
	if err := encoder.Encode(root); err != nil {
		return "", err
	}
	err := encoder.Close()
	return out.String(), err
}

// withNewline returns a text that ends with a line break.
func withNewline(text string) string {
	if strings.HasSuffix(text, "\n") {
		return text
	}
	return text + "\n"
}

// lastLine returns the last line of a text, with one line break.
func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimRight(string(text), "\r\n"), "\n")
	return strings.TrimRight(lines[len(lines)-1], "\r") + "\n"
}

// indentation returns the number of spaces by which a document indents mappings, and whether lists
// begin in the column of their key. The first of each decides.
func indentation(root *yaml.Node) (spaces int, compact bool) {
	spaces, compact = 0, true
	lists := false
	visit(root, func(m *yaml.Node) {
		if m.Kind != yaml.MappingNode || m.Style&yaml.FlowStyle != 0 {
			return
		}
		for i := 0; i+1 < len(m.Content); i += 2 {
			key, v := m.Content[i], m.Content[i+1]
			if v.Style&yaml.FlowStyle != 0 || len(v.Content) == 0 || v.Line == key.Line {
				continue
			}
			switch deeper := v.Column - key.Column; {
			case v.Kind == yaml.SequenceNode && !lists:
				lists, compact = true, deeper == 0
			case v.Kind == yaml.MappingNode && spaces == 0:
				spaces = deeper
			}
		}
	})
	if spaces < 2 || spaces > 8 {
		spaces = 2
	}
	return spaces, compact
}
