package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/yamltext"
)

// A document is one of the documents of a manifest, which lines with --- separate.
type document struct {
	*yamltext.Document
	object map[string]any // nil without an object
	root   *yaml.Node     // nil for JSON
	line   int            // of the object in the manifest
}

// split returns the documents of a text.
func split(text []byte) ([]*document, error) {
	var documents []*document
	var failures []error
	for _, part := range yamltext.Split(text) {
		d := &document{Document: part}
		if err := d.read(); err != nil {
			failures = append(failures, d.withLine(err))
		}
		documents = append(documents, d)
	}
	return documents, errors.Join(failures...)
}

// read reads the tree and the object.
func (d *document) read() (err error) {
	switch {
	case yamltext.Blank(d.Body):
		return nil
	case isJSON(d.Body):
		d.line = d.Before + 1 + bytes.Count(d.Body[:bytes.IndexAny(d.Body, "{[\"0123456789-tfn")], []byte("\n"))
	default:
		if d.root, err = parseYAML(d.Body); err != nil || d.root.Kind != yaml.MappingNode {
			return err
		}
		d.line = d.Before + d.root.Line
	}
	v, err := readValue(d.Body)
	d.object, _ = v.(map[string]any)
	return err
}

// withLine returns err with the number of the line in the manifest.
func (d *document) withLine(err error) error {
	line, message := yamltext.Cause(err)
	if line == 0 {
		return fmt.Errorf("line %d: document that begins here: %s", d.Before+1, message)
	}
	return fmt.Errorf("line %d: %s", d.Before+line, message)
}

// render returns the document with d.object as its content. It reads the text again, and returns an error if its content
// differs: an error is better than a manifest with another content.
func (d *document) render() ([]byte, error) {
	if d.root == nil {
		var text bytes.Buffer
		_ = json.Indent(&text, writeJSON(d.object), "", "    ") // as kubectl has it; the text is valid
		return d.checked(append(text.Bytes(), '\n'))
	}
	before, _ := readValue(d.Body) // without an error, as in read
	c := change{map[*yaml.Node][]*yaml.Node{}, map[*yaml.Node]any{}}
	c.apply(d.root, before, d.object)
	body := strings.TrimSuffix(string(d.Body), "\n") + "\n"
	s := splicer{old: c.old, lines: strings.SplitAfter(body, "\n")}
	s.lines = s.lines[:len(s.lines)-1]
	end := len(s.lines)
	if strings.HasPrefix(s.lines[end-1], "...") {
		end--
	}
	if s.collection(d.root, end) {
		s.to(len(s.lines))
		if text, err := d.checked([]byte(s.out.String())); err == nil {
			return text, nil
		}
	}
	return d.checked([]byte(encodeYAML(d.root) + strings.Join(s.lines[end:], "")))
}

// checked returns text if it has the content of the document, otherwise an error.
func (d *document) checked(text []byte) ([]byte, error) {
	if v, err := readValue(text); err != nil || !reflect.DeepEqual(v, any(d.object)) {
		return d.Body, fmt.Errorf("line %d: the document cannot be written as YAML again; simplify it, for example its anchors and its folded texts (>)", d.Before+1)
	}
	return text, nil
}
