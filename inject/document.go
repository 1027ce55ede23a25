package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/yamltext"
)

// A document is one of the documents of a manifest, which lines with --- separate.
type document struct {
	*yamltext.Document
	root *yaml.Node // nil without an object
}

// split returns the documents of a text. A document without an object has no root.
func split(text []byte) ([]*document, error) {
	var documents []*document
	var failures []error
	for _, part := range yamltext.Split(text) {
		d := &document{Document: part}
		documents = append(documents, d)
		failures = append(failures, d.parse())
	}
	return documents, errors.Join(failures...)
}

// parse reads the body.
func (d *document) parse() error {
	if yamltext.Blank(d.Body) {
		return nil
	}
	node, err := d.read(d.Body)
	if err != nil {
		return d.withLine(err)
	}
	if node != nil && node.Content[0].Kind == yaml.MappingNode {
		d.root = node
		visit(node, func(n *yaml.Node) { n.Line += d.Before })
	}
	return nil
}

// read returns the tree of a text in the language of the document: JSON, or YAML.
func (d *document) read(text []byte) (*yaml.Node, error) {
	if !json.Valid(d.Body) {
		return parseOne(text)
	}
	if !utf8.Valid(text) {
		return nil, errors.New("want JSON in UTF-8")
	}
	node, err := readJSON(text, math.MaxInt, math.MaxInt)
	if err != nil {
		return nil, err
	}
	return &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{node}, Line: node.Line}, validate(node)
}

// withLine returns err, an error of the YAML library, with the number of the line in the manifest.
func (d *document) withLine(err error) error {
	line, message := yamltext.Cause(err)
	if line == 0 {
		return fmt.Errorf("line %d: document that begins here: %s", d.Before+1, message)
	}
	return fmt.Errorf("line %d: %s", d.Before+line, message)
}

// render returns a changed document as text. It reads the text again, and returns an error if its content differs: an
// error is better than a manifest with another content.
func (d *document) render(root *yaml.Node) ([]byte, error) {
	if json.Valid(d.Body) {
		return d.checked(d.json(root), root)
	}
	spaces, compact := indentation(d.root)
	next, err := encodeText(root, spaces, compact)
	if err != nil {
		return d.Body, fmt.Errorf("line %d: writing the document: %w", d.Before+1, err)
	}
	end := ""
	if line := lastLine(d.Body); strings.HasPrefix(line, "...") {
		end = line
	}
	next += end
	raw := strings.ReplaceAll(string(d.Body), "\r\n", "\n")
	ending := func(text string) []byte {
		if len(raw) < len(d.Body) {
			text = strings.ReplaceAll(text, "\n", "\r\n")
		}
		return []byte(text)
	}
	// Keep the lines of the document, if the result has the same content.
	if base, err := encodeText(d.root, spaces, compact); err == nil {
		if merged, ok := merge(withNewline(raw), base+end, next); ok {
			if text, err := d.checked(ending(merged), root); err == nil {
				return text, nil
			}
		}
	}
	return d.checked(ending(next), root)
}

// checked returns text if its content is root, otherwise an error.
func (d *document) checked(text []byte, root *yaml.Node) ([]byte, error) {
	again, err := d.read(text)
	if err != nil {
		return d.Body, fmt.Errorf("line %d: the document cannot be written as YAML again; simplify it, for example its anchors and its folded texts (>): %w", d.Before+1, err)
	}
	if again == nil || !sameTree(root.Content[0], again.Content[0], false) {
		return d.Body, fmt.Errorf("line %d: the document cannot be written as YAML again without changes elsewhere; simplify it, for example its anchors and its folded texts (>)", d.Before+1)
	}
	return text, nil
}

// json returns a tree as JSON with the indentation of the document.
func (d *document) json(root *yaml.Node) []byte {
	var w jsonWriter
	for line := range bytes.Lines(bytes.TrimSpace(d.Body)) {
		if text := bytes.TrimLeft(line, " \t"); len(text) < len(line) {
			w.indent = string(line[:len(line)-len(text)])
			break
		}
	}
	w.node(root.Content[0], "")
	w.WriteByte('\n')
	return w.Bytes()
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
// begin in the column of their key. The first mapping and the first list decide.
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
	if spaces == 0 {
		spaces = 2 // the encoder would take 4; it also takes 2 for numbers that it cannot write
	}
	return spaces, compact
}
