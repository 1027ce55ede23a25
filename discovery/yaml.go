package discovery

import (
	"fmt"
	"net/netip"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/discovery/object"
)

// maxAliasDepth bounds how far aliases are followed, because an anchor may contain itself.
const maxAliasDepth = 16

// document collects the errors in a document while it is decoded. The same error is kept
// once, because a field may be read twice.
type document struct {
	file  string
	text  *chunk
	lines int // number of lines
	errs  []object.Error
}

func (d *document) fail(line int, field, format string, args ...any) {
	// YAML has line breaks that editors do not count, such as U+2028.
	line = min(line, d.lines)
	e := object.Error{File: d.file, Line: d.text.offset + line, Field: field, Msg: fmt.Sprintf(format, args...)}
	if !slices.Contains(d.errs, e) {
		d.errs = append(d.errs, e)
	}
}

// field is a node of a document with its path. A field whose node is nil is absent: its
// methods then return the zero value, without an error.
type field struct {
	doc  *document
	node *yaml.Node
	path string
}

// newField returns the field of a node. It follows aliases and treats null as absent.
func newField(doc *document, node *yaml.Node, path string) field {
	for depth := 0; node != nil && node.Kind == yaml.AliasNode; depth++ {
		if depth == maxAliasDepth {
			doc.fail(node.Line, path, "aliases nest too deeply")
			return field{doc: doc, path: path}
		}
		node = node.Alias
	}
	if node != nil && (node.Kind == 0 || node.ShortTag() == "!!null") {
		node = nil
	}
	return field{doc: doc, node: node, path: path}
}

func (f field) present() bool { return f.node != nil }

func (f field) fail(format string, args ...any) {
	f.doc.fail(f.line(), f.path, format, args...)
}

func (f field) line() int {
	if f.node == nil {
		return 1
	}
	return f.node.Line
}

// want reports whether the field is present and of the given kind. Another kind is an
// error.
func (f field) want(kind yaml.Kind, what string) bool {
	if f.node == nil {
		return false
	}
	if f.node.Kind != kind {
		f.fail("want %s, got %s", what, describe(f.node))
		return false
	}
	return true
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!int":
		return "the integer " + n.Value
	case "!!float":
		return "the number " + n.Value
	case "!!bool":
		return "the boolean " + n.Value
	case "!!str":
		return fmt.Sprintf("the string %q", n.Value)
	}
	return fmt.Sprintf("%q", n.Value)
}

// get returns the member with a name. A member that occurs twice is an error, because the
// two may differ. Merge keys ("<<") are looked up last.
func (f field) get(name string) field {
	path := name
	if f.path != "" {
		path = f.path + "." + name
	}
	if !f.want(yaml.MappingNode, "an object") {
		return field{doc: f.doc, path: path}
	}
	return newField(f.doc, f.doc.member(f.node, name, path, 0), path)
}

func (d *document) member(m *yaml.Node, name, path string, depth int) *yaml.Node {
	var found *yaml.Node
	for i := 0; i+1 < len(m.Content); i += 2 {
		if k := m.Content[i]; k.Kind != yaml.ScalarNode || k.Value != name {
			continue
		}
		if found != nil {
			d.fail(m.Content[i].Line, path, "occurs twice, first in line %d", d.text.offset+found.Line)
			return found
		}
		found = m.Content[i+1]
	}
	if found != nil || depth == maxAliasDepth {
		return found
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
			return d.member(merged, name, path, depth+1)
		}
	}
	return nil
}

func (f field) isString() bool { return f.present() && f.node.ShortTag() == "!!str" }

// str returns a string.
func (f field) str() string {
	if !f.want(yaml.ScalarNode, "a string") {
		return ""
	}
	if !f.isString() {
		f.fail("want a string, got %s", describe(f.node))
		return ""
	}
	return f.node.Value
}

// boolean returns a boolean, or fallback if the field is absent.
func (f field) boolean(fallback bool) bool {
	if !f.present() {
		return fallback
	}
	var b bool
	if !f.want(yaml.ScalarNode, "a boolean") {
		return fallback
	}
	if f.node.ShortTag() != "!!bool" || f.node.Decode(&b) != nil {
		f.fail("want a boolean, got %s", describe(f.node))
		return fallback
	}
	return b
}

// port returns the number of a port, or 0 if the field is absent or invalid.
func (f field) port() uint16 {
	if !f.want(yaml.ScalarNode, "a port number") {
		return 0
	}
	var n uint16
	if f.node.ShortTag() != "!!int" || f.node.Decode(&n) != nil || n == 0 {
		f.fail("want a port number, 1 to 65535, got %s", describe(f.node))
		return 0
	}
	return n
}

// list returns the elements of a list.
func (f field) list() []field {
	if !f.want(yaml.SequenceNode, "a list") {
		return nil
	}
	out := make([]field, 0, len(f.node.Content))
	for i, n := range f.node.Content {
		e := newField(f.doc, n, fmt.Sprintf("%s[%d]", f.path, i))
		if !e.present() {
			f.doc.fail(n.Line, e.path, "is empty")
			continue
		}
		out = append(out, e)
	}
	return out
}

// stringMap returns an object whose values are strings.
func (f field) stringMap() map[string]string {
	if !f.want(yaml.MappingNode, "an object") {
		return nil
	}
	out := make(map[string]string, len(f.node.Content)/2)
	for i := 0; i+1 < len(f.node.Content); i += 2 {
		k := f.node.Content[i]
		if k.Kind != yaml.ScalarNode || k.ShortTag() == "!!merge" {
			continue
		}
		out[k.Value] = newField(f.doc, f.node.Content[i+1], f.path+"."+k.Value).str()
	}
	return out
}

// portMap returns an object whose values are numbers of ports. Invalid ones are left out.
func (f field) portMap() map[string]uint16 {
	if !f.want(yaml.MappingNode, "an object") {
		return nil
	}
	out := make(map[string]uint16, len(f.node.Content)/2)
	for i := 0; i+1 < len(f.node.Content); i += 2 {
		k := f.node.Content[i]
		if k.Kind != yaml.ScalarNode || k.ShortTag() == "!!merge" {
			continue
		}
		if n := newField(f.doc, f.node.Content[i+1], f.path+"."+k.Value).port(); n != 0 {
			out[k.Value] = n
		}
	}
	return out
}

// addr returns an IP address, and false if the field is absent, empty or invalid.
func (f field) addr() (netip.Addr, bool) {
	s := f.str()
	if s == "" {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		f.fail("want an IP address, got %q", s)
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// addrs returns a list of IP addresses.
func (f field) addrs() []netip.Addr {
	var out []netip.Addr
	for _, e := range f.list() {
		if a, ok := e.addr(); ok {
			out = append(out, a)
		}
	}
	return out
}
