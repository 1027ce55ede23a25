package inject

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

// maxAliased is how many values the aliases of a document may add to the document. Injection copies each part that it
// changes, and replaces the aliases in the copy by copies of the values that they name.
const maxAliased = 100_000

// parseOne returns the only value of a text; nil if there is none. A second value, such as another
// object in JSON, is an error, because it would be lost.
func parseOne(text []byte) (*yaml.Node, error) {
	decoder, node := yaml.NewDecoder(bytes.NewReader(text)), new(yaml.Node)
	switch err := decoder.Decode(node); {
	case errors.Is(err, io.EOF):
		return nil, nil //nolint:nilnil // documented
	case err != nil:
		return nil, err
	}
	next := new(yaml.Node)
	switch err := decoder.Decode(next); {
	case errors.Is(err, io.EOF):
		return node, validate(node)
	case err != nil:
		return nil, fmt.Errorf("%w, in what follows the first value: write a line --- before a second one", err)
	}
	return nil, fmt.Errorf("yaml: line %d: a second value follows: write a line --- before it", next.Line)
}

// validate returns an error if an object in a document has a key twice, because programs differ in which of the two they
// use. It also returns an error if an alias contains itself, or if the aliases add too many values.
func validate(root *yaml.Node) error {
	v := validator{sizes: map[*yaml.Node]int{}}
	expanded, err := v.size(root)
	if err == nil && expanded-v.values > maxAliased {
		err = fmt.Errorf("yaml: line %d: the aliases of the document add more than %d values: write out what they name", root.Line, maxAliased)
	}
	return err
}

// A validator is the state of one call of validate.
type validator struct {
	values int                // number of values, without those that aliases name
	sizes  map[*yaml.Node]int // the size of each node with an anchor; 0 until the whole node was counted
}

// size returns the number of values of a tree, including the values that its aliases name.
func (v *validator) size(n *yaml.Node) (int, error) {
	if n.Kind == yaml.AliasNode {
		size := v.sizes[n.Alias] // an anchor comes before its aliases
		if size == 0 {
			return 0, fmt.Errorf("yaml: line %d: the alias *%s is inside what it names", n.Line, n.Value)
		}
		return size, nil
	}
	v.values++
	if n.Kind == yaml.MappingNode {
		if err := unique(n); err != nil {
			return 0, err
		}
	}
	total := 1
	for _, child := range n.Content {
		size, err := v.size(child)
		if err != nil {
			return 0, err
		}
		total = min(total+size, 1<<40) // no overflow
	}
	if n.Anchor != "" {
		v.sizes[n] = total
	}
	return total, nil
}

// unique returns an error if a mapping has a key twice.
func unique(m *yaml.Node) error {
	seen := make(map[string]bool, len(m.Content)/2)
	for i := 0; i+1 < len(m.Content); i += 2 {
		key := m.Content[i]
		if k := target(key); k.Kind == yaml.ScalarNode {
			if seen[k.Value] {
				return fmt.Errorf("yaml: line %d: the key %.100q is in this object twice: remove one of them", key.Line, k.Value)
			}
			seen[k.Value] = true
		}
	}
	return nil
}
