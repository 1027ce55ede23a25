// Package clip shortens texts that come from outside before they are logged, kept or sent, and makes them harmless
// before a terminal shows them.
package clip

import (
	"strings"
	"unicode"
)

// Text returns text if it has at most limit bytes. Otherwise it returns the first limit bytes, followed by "...". It
// leaves out bytes that are not UTF-8, such as half a character at the cut.
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}

// Line returns text for one line of a terminal: each character that a terminal might obey, a line break included,
// becomes "?".
func Line(text string) string { return shown(text, "") }

// Lines is like Line, but keeps line breaks and tabs.
func Lines(text string) string { return shown(text, "\n\t") }

// shown replaces the characters that are neither printable nor in kept.
func shown(text, kept string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) && !strings.ContainsRune(kept, r) {
			return '?'
		}
		return r
	}, text)
}
