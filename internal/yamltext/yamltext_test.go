package yamltext_test

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/yamltext"
)

// TestSplit checks where documents begin and end.
func TestSplit(t *testing.T) { // I13, D18
	for text, want := range map[string][]yamltext.Document{
		"":                              nil,
		"a: b":                          {{Body: []byte("a: b")}},
		"---\na\n---\nb\n":              {{Marker: []byte("---\n"), Body: []byte("a\n"), Before: 1}, {Marker: []byte("---\n"), Body: []byte("b\n"), Before: 3}},
		"a\n--- # two\nb\n":             {{Body: []byte("a\n")}, {Marker: []byte("--- # two\n"), Body: []byte("b\n"), Before: 2}},
		"a\n---# two\nb\n...#\n":        {{Body: []byte("a\n")}, {Marker: []byte("---# two\n"), Body: []byte("b\n...#\n"), Before: 2}},
		"a\n--- b\nc\n":                 {{Body: []byte("a\n")}, {Marker: []byte("---"), Body: []byte(" b\nc\n"), Before: 1}},
		"a\n...\nb\n":                   {{Body: []byte("a\n...\n")}, {Body: []byte("b\n"), Before: 2}},
		"a: \"\n--- \n\"\n----\n...b\n": {{Body: []byte("a: \"\n")}, {Marker: []byte("--- \n"), Body: []byte("\"\n----\n...b\n"), Before: 2}},
		"a\r\n---\r\nb\r\n---":          {{Body: []byte("a\r\n")}, {Marker: []byte("---\r\n"), Body: []byte("b\r\n"), Before: 2}, {Marker: []byte("---"), Before: 4}},
	} {
		var got []yamltext.Document
		for _, d := range yamltext.Split([]byte(text)) {
			got = append(got, *d)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%q: (-want +got)\n%s", text, diff)
		}
	}
}

// TestCause checks the line of errors, which the library counts in two ways.
func TestCause(t *testing.T) { // I13, D18
	for body, want := range map[string]int{
		"a: *b\n":                   0, // an alias without an anchor
		"a: b\n c: d\n":             2, // the scanner's: mapping values are not allowed
		"a:\n\tb: c\n":              2, // the scanner's: a tab
		"{a: b}\n{c: d}\n":          2, // the parser's: no document start
		"a:\n  b: {c: d\ne: f\n":    2, // the parser's: the mapping that begins here has no end
		"a: b\nc: [d\ne: f]\n- g\n": 2, // the parser's: the list that begins here has no end
	} {
		dec := yaml.NewDecoder(bytes.NewReader([]byte(body)))
		var err error
		for err == nil {
			err = dec.Decode(new(yaml.Node))
		}
		if errors.Is(err, io.EOF) {
			t.Errorf("%q: no error", body)
		} else if line, message := yamltext.Cause(err); line != want {
			t.Errorf("%q: line %d, want %d: %s", body, line, want, message)
		}
	}
}

// FuzzSplit checks that no byte of a text is lost, and that a blank document has no value.
func FuzzSplit(f *testing.F) { // I13, D18
	for _, text := range []string{"a: b\n---\n# c\n%YAML 1.2\n---\nd\n...\n", "--- a\r\n...\r\n--- # b", "...", "\xef\xbb\xbf---\n", "#\r::", "#\u2028a: b"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var joined []byte
		for _, d := range yamltext.Split(text) {
			if lines := bytes.Count(joined, []byte("\n")) + bytes.Count(d.Marker, []byte("\n")); lines != d.Before && len(d.Body) > 0 {
				t.Errorf("%q: after %d lines, want %d", d.Body, d.Before, lines)
			}
			joined = append(append(joined, d.Marker...), d.Body...)
			var node yaml.Node
			if yamltext.Blank(d.Body) && yaml.Unmarshal(d.Body, &node) == nil && len(node.Content) > 0 && node.Content[0].Kind == yaml.MappingNode {
				t.Errorf("%q is not blank", d.Body)
			}
		}
		if !bytes.Equal(joined, text) {
			t.Errorf("%q has become %q", text, joined)
		}
	})
}
