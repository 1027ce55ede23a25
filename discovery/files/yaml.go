package files

import (
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/yamltext"
)

// maxAliasDepth bounds how far aliases are followed, because an anchor may contain itself.
const maxAliasDepth = 16

// document collects the errors in a document while the document is decoded. It keeps equal errors only
// once, because a field may be read twice.
type document struct {
	file  string
	text  *yamltext.Document
	lines int // number of lines
	errs  []object.Error
}

func (d *document) fail(line int, field, format string, args ...any) {
	// The parser also counts line breaks that editors do not count, such as U+2028.
	line = min(line, d.lines)
	d.errs = object.AppendError(d.errs, object.Error{File: d.file, Line: d.text.Before + line, Field: field, Msg: fmt.Sprintf(format, args...)})
}

// report adds an error in a field. For an absent field, the line is 1.
func (d *document) report(f decode.Field, message string) {
	d.fail(lineOf(f), f.Path, "%s", message)
}

// lineOf returns the line of a field in its document, counted from 1; 1 for an absent field.
func lineOf(f decode.Field) int {
	if v, ok := f.Value.(value); ok {
		return v.node.Line
	}
	return 1
}

// field returns the field of a node. Errors in the field are added to the document.
func (d *document) field(node *yaml.Node) decode.Field {
	v := newValue(node, d.text.Before)
	if v.Kind() == decode.Null {
		return decode.NewField(nil, "", d.report)
	}
	return decode.NewField(v, "", d.report)
}

// A value is a node of a document, with aliases resolved.
type value struct {
	node   *yaml.Node
	offset int // the number of lines before the document in its file
}

// newValue returns the value of a node. It follows at most maxAliasDepth aliases, because an anchor may contain itself.
func newValue(node *yaml.Node, offset int) value {
	for range maxAliasDepth {
		if node.Kind != yaml.AliasNode {
			break
		}
		node = node.Alias
	}
	return value{node, offset}
}

// Kind returns the kind of the value.
func (v value) Kind() decode.Kind {
	switch v.node.Kind {
	case 0:
		return decode.Null
	case yaml.MappingNode:
		return decode.Object
	case yaml.SequenceNode:
		return decode.List
	}
	switch v.node.ShortTag() {
	case "!!null":
		return decode.Null
	case "!!str":
		return decode.String
	case "!!int":
		return decode.Integer
	case "!!float":
		return decode.Number
	case "!!bool":
		return decode.Boolean
	}
	return decode.Other
}

// Text returns a scalar as text.
func (v value) Text() string {
	var b bool
	if v.node.ShortTag() == "!!bool" && v.node.Decode(&b) == nil {
		return strconv.FormatBool(b)
	}
	return v.node.Value
}

// Member returns the member of a mapping with the given name.
func (v value) Member(name string) (decode.Value, error) {
	found, err := v.member(v.node, name, 0)
	if found == nil {
		return nil, err
	}
	if member := newValue(found, v.offset); member.Kind() != decode.Null {
		return member, err
	}
	return nil, err
}

// Names returns the names of a mapping's members, without the members that merge keys ("<<") add.
func (v value) Names() []string {
	var names []string
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		if k := v.node.Content[i]; k.Kind == yaml.ScalarNode && k.ShortTag() != "!!merge" {
			names = append(names, k.Value)
		}
	}
	return names
}

// Len returns the number of elements of a sequence.
func (v value) Len() int { return len(v.node.Content) }

// At returns an element of a sequence.
func (v value) At(index int) decode.Value { return newValue(v.node.Content[index], v.offset) }

// member returns the member of the mapping m with the given name, nil if there is none. It returns an error if the member
// occurs twice, because the two may differ. It looks at merge keys ("<<") last.
func (v value) member(m *yaml.Node, name string, depth int) (found *yaml.Node, err error) {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if k := m.Content[i]; k.Kind != yaml.ScalarNode || k.Value != name {
			continue
		}
		if found != nil {
			return m.Content[i+1], fmt.Errorf("occurs twice, first in line %d", v.offset+found.Line)
		}
		found = m.Content[i+1]
	}
	if found != nil || depth == maxAliasDepth {
		return found, nil
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].ShortTag() != "!!merge" {
			continue
		}
		merged := m.Content[i+1]
		if merged.Kind == yaml.AliasNode {
			merged = merged.Alias
		}
		if merged.Kind == yaml.MappingNode {
			return v.member(merged, name, depth+1)
		}
	}
	return nil, nil //nolint:nilnil // documented
}
