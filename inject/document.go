package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/yamltext"
)

// A document is one of the documents of a manifest, which lines with --- separate.
type document struct {
	*yamltext.Document
	object map[string]any // nil without an object
	json   bool           // it is JSON
	line   int            // of the object in the manifest
}

// split returns the documents of a text.
func split(text []byte) ([]*document, error) {
	var documents []*document
	var failures []error
	for _, part := range yamltext.Split(text) {
		d := &document{Document: part}
		if err := d.read(); err != nil {
			line, message := yamltext.Cause(err)
			if line == 0 {
				line, message = 1, "document that begins here: "+message
			}
			failures = append(failures, fmt.Errorf("line %d: %s", d.Before+line, message))
		}
		documents = append(documents, d)
	}
	return documents, errors.Join(failures...)
}

// read reads the object.
func (d *document) read() error {
	if yamltext.Blank(d.Body) {
		return nil
	}
	d.line = d.Before + 1
	if d.json = isJSON(d.Body); d.json {
		d.line += bytes.Count(d.Body[:bytes.IndexAny(d.Body, "{[\"0123456789-tfn")], []byte("\n"))
	} else {
		tree, err := parseYAML(d.Body)
		if err != nil {
			return err
		}
		d.line = d.Before + tree.Content[0].Line
	}
	v, err := readValue(d.Body)
	d.object, _ = v.(map[string]any)
	return err
}

// render returns the document with d.object as its content, in the form that kubectl writes.
func (d *document) render() []byte {
	text := writeObject(d.object, d.json)
	if bytes.Contains(d.Body, []byte("\n...")) && !isJSON(text) {
		text = append(text, "...\n"...)
	}
	if !bytes.HasSuffix(d.Marker, []byte("\n")) && len(d.Marker) > 0 { // the object began on this line
		text = append([]byte("\n"), text...)
	}
	return text
}

// writeObject returns an object in the form that kubectl writes. YAML that would be read as another object becomes JSON.
func writeObject(object map[string]any, asJSON bool) []byte {
	// YAML takes these characters for line breaks, or refuses them, unless they are escaped.
	special := regexp.MustCompile("[\u007f-\u009f\ufeff\ufffe\uffff]")
	encoded := special.ReplaceAllFunc(writeJSON(object), func(c []byte) []byte { return fmt.Appendf(nil, `\u%04x`, []rune(string(c))[0]) })
	text, _ := kyaml.JSONToYAML(encoded) // after an error, the text is another object
	if v, err := readValue(text); !asJSON && err == nil && reflect.DeepEqual(v, any(object)) {
		return text
	}
	var indented bytes.Buffer
	_ = json.Indent(&indented, encoded, "", "    ") // the text is valid
	return append(indented.Bytes(), '\n')
}

// parseYAML returns the tree of a text with one value, whose first child is that value. A second value, such as another
// object in JSON, is an error, because it would be lost, and so is a key that is in an object twice.
func parseYAML(text []byte) (*yaml.Node, error) {
	decoder, document := yaml.NewDecoder(bytes.NewReader(text)), new(yaml.Node)
	err := decoder.Decode(document)
	if err == nil {
		err = document.Decode(new(any))
	}
	if wrong := new(yaml.TypeError); errors.As(err, &wrong) {
		key, _, _ := strings.Cut(wrong.Errors[0], " already defined at line ") // a number that the caller would have to correct
		err = fmt.Errorf("yaml: %s is in this object twice", key)
	}
	if err != nil {
		return nil, err
	}
	err = decoder.Decode(new(yaml.Node))
	if errors.Is(err, io.EOF) {
		return document, nil
	}
	if err == nil {
		err = fmt.Errorf("yaml: line %d: more than one object", document.Line)
	}
	return nil, fmt.Errorf("%w: write a line --- before a second one", err)
}

// readValue returns the value of a text in YAML or JSON, as kubectl reads it: of YAML 1.1, in which `no` is a truth value.
func readValue(text []byte) (v any, err error) {
	if !isJSON(text) {
		if text, err = kyaml.YAMLToJSON(text); err != nil {
			return nil, err
		}
	}
	return readJSON(text)
}

func isJSON(text []byte) bool { return json.Valid(text) && utf8.Valid(text) }

// readJSON returns the value of a text in JSON: nil, bool, json.Number, string, []any or map[string]any.
func readJSON(text []byte) (v any, err error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err = decoder.Decode(&v); err == nil && decoder.More() {
		err = errors.New("want one object in JSON")
	}
	return v, err
}

// writeJSON returns a value as JSON. Unlike json.Marshal it leaves <, > and & as they are.
func writeJSON(v any) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(v) // cannot fail: v comes from JSON or YAML, or has one of Kubernetes' types
	return bytes.TrimSuffix(out.Bytes(), []byte{'\n'})
}

// encode returns the value of v, which has one of Kubernetes' types.
func encode(v any) any {
	value, err := readJSON(writeJSON(v))
	if err != nil {
		panic(fmt.Sprintf("encoding a %T: %v", v, err))
	}
	return value
}
