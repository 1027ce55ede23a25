package discovery

import (
	"fmt"
	"net/netip"
	"slices"

	"go.yaml.in/yaml/v3"
)

// maxAliasDepth bounds how far aliases are followed: an anchor may contain
// itself, which YAML's parser lets through.
const maxAliasDepth = 16

// document collects what is wrong with one document while it is decoded. A
// field may be read twice; its error is kept once.
type document struct {
	file  string
	text  *chunk
	lines int // lines of the document
	errs  []DocumentError
}

func (d *document) fail(line int, field, format string, args ...any) {
	// YAML counts line breaks that editors do not, such as U+2028.
	line = min(line, d.lines)
	e := DocumentError{File: d.file, Line: d.text.offset + line, Field: field, Msg: fmt.Sprintf(format, args...)}
	if !slices.Contains(d.errs, e) {
		d.errs = append(d.errs, e)
	}
}

// field is a node of a document together with its path. A field whose node is
// nil is absent: every reader then returns its zero value, without an error.
type field struct {
	doc  *document
	node *yaml.Node
	path string
}

// newField follows aliases and treats null as absent.
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

// want reports whether the field is there and of the given kind; another kind
// is an error.
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

// get returns the member called name. A member that is written twice is an
// error, as the two may differ; merge keys ("<<") are looked into last.
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
			d.fail(m.Content[i].Line, path, "is there twice, first in line %d", d.text.offset+found.Line)
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

// str reads a string.
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

// boolean reads a boolean, absent is what is returned if there is none.
func (f field) boolean(absent bool) bool {
	if !f.present() {
		return absent
	}
	var b bool
	if !f.want(yaml.ScalarNode, "a boolean") {
		return absent
	}
	if f.node.ShortTag() != "!!bool" || f.node.Decode(&b) != nil {
		f.fail("want a boolean, got %s", describe(f.node))
		return absent
	}
	return b
}

// list reads the elements of a list.
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

// stringMap reads an object whose values are strings.
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

// addr reads an IP address; an empty string counts as absent.
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

// addrs reads a list of IP addresses.
func (f field) addrs() []netip.Addr {
	var out []netip.Addr
	for _, e := range f.list() {
		if a, ok := e.addr(); ok {
			out = append(out, a)
		}
	}
	return out
}
