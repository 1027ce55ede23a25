package inject

import (
	"strings"
	"testing"
)

// TestMerge checks that blank lines and the form of lines stay, and that changes of the same line by
// both texts are not merged.
func TestMerge(t *testing.T) { // I13
	t.Parallel()
	for _, test := range []struct{ raw, base, next, want string }{
		{"a b c", "a b c", "a b c", "a b c"},
		{"A b c", "a b c", "a b x c", "A b x c"},
		{"a _ b", "a b", "a x b", "a _ x b"},
		{"_ a _ b _", "a b", "x a b y", "_ x a _ b _ y"},
		{"a _ b c", "a b c", "a c", "a _ c"},
		{"", "", "x", "x"},
		{"a", "a", "", ""},
		{"A", "a", "a x", "A x"},
		{"A B _ c", "a c", "a x c", "A B _ x c"},
		{"c A B", "c a", "c x a", "c x A B"},
		{"A b", "a b", "x b", "conflict"},
		{"A", "a", "x a y", "conflict"},
		{"a B", "a b", "a", "conflict"},
	} {
		text := func(words string) string {
			var lines strings.Builder
			for _, word := range strings.Fields(words) {
				lines.WriteString(strings.Trim(word, "_") + "\n")
			}
			return lines.String()
		}
		got, ok := merge(text(test.raw), text(test.base), text(test.next))
		if want := text(test.want); ok && got != want || ok == (test.want == "conflict") {
			t.Errorf("%+v: %q, %v", test, got, ok)
		}
	}
}
