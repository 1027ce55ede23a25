package clip_test

import (
	"testing"

	"github.com/nametap/nametap/internal/clip"
)

// TestText checks that a text is shortened between two characters.
func TestText(t *testing.T) { // D46
	for text, want := range map[string]string{
		"": "", "abc": "abc", "abcd": "abcd", "abcde": "abcd...", "abcé": "abc...", "ééé": "éé...", "\xff\xfe\xfd\xfc": "\xff\xfe\xfd\xfc", "\xff\xfe\xfd\xfca": "...",
	} {
		if got := clip.Text(text, 4); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestLine checks that a terminal gets no character that it might obey.
func TestLine(t *testing.T) { // R22
	for text, want := range map[string][2]string{
		"µs → é":                {"µs → é", "µs → é"},
		"a\x1b[31m\a\x00\u009b": {"a?[31m???", "a?[31m???"},
		"a\r\n\tb":              {"a???b", "a?\n\tb"},
		"\u202ea\u200b\xff":     {"?a?\ufffd", "?a?\ufffd"},
	} {
		if got := [2]string{clip.Line(text), clip.Lines(text)}; got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
