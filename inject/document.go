package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"go.yaml.in/yaml/v3"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/yamltext"
)

// A document is one of the documents of a manifest, which lines with --- separate.
type document struct {
	*yamltext.Document
	object map[string]any // nil without an object
	tree   *yaml.Node     // nil for JSON
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
		if d.tree, err = parseYAML(d.Body); err != nil || d.tree.Content[0].Kind != yaml.MappingNode {
			return err
		}
		d.line = d.Before + d.tree.Content[0].Line
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

// render returns the document with d.object as its content: with the comments, unless the YAML library then writes another
// content, which may happen with folded texts (>) and anchors. JSON, which is YAML, too, has any content.
func (d *document) render() []byte {
	if d.tree != nil {
		before, _ := readValue(d.Body) // without an error, as in read
		change{}.apply(d.tree.Content[0], before, d.object)
		plain, _ := kyaml.JSONToYAML(writeJSON(d.object)) // the value is found wrong after an error
		for _, text := range [][]byte{encodeYAML(d.tree), plain} {
			if bytes.Contains(d.Body, []byte("\n...")) {
				text = append(text, "...\n"...)
			}
			if v, err := readValue(text); err == nil && reflect.DeepEqual(v, any(d.object)) {
				return text
			}
		}
	}
	var text bytes.Buffer
	_ = json.Indent(&text, writeJSON(d.object), "", "    ") // as kubectl has it; the text is valid
	return append(text.Bytes(), '\n')
}
