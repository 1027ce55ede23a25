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
