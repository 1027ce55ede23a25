package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	kjson "k8s.io/apimachinery/pkg/util/json"
	kyaml "sigs.k8s.io/yaml"
)

// parseYAML returns the tree of a text with one value, whose first child is that value. A second value, such as another object in JSON, is an error, because
// it would be lost, and so is a key that is in an object twice.
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
func readValue(text []byte) (any, error) {
	if isJSON(text) {
		return readJSON(text)
	}
	encoded, err := kyaml.YAMLToJSON(text)
	if err != nil {
		return nil, err
	}
	return readJSON(encoded)
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

// newNode returns the tree of a value. The name of an object comes first.
func newNode(v any) *yaml.Node {
	n, plain := new(yaml.Node), any(nil)
	_ = kjson.Unmarshal(writeJSON(v), &plain) // with numbers for json.Number, which YAML would have as texts
	_ = n.Encode(plain)
	nameFirst(n)
	return n
}

func nameFirst(n *yaml.Node) {
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && child.Value == "name" {
			n.Content = append([]*yaml.Node{child, n.Content[i+1]}, append(n.Content[:i:i], n.Content[i+2:]...)...)
		}
		nameFirst(child)
	}
}

// encodeYAML returns a tree as a text, in the form that kubectl has.
func encodeYAML(n *yaml.Node) []byte {
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	_ = encoder.Encode(n) // a text that is not right is found when it is read again
	return out.Bytes()
}
