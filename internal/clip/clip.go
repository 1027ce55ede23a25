// Package clip shortens texts that come from outside before they are logged, kept or sent.
package clip

import "strings"

// Text returns text if it has at most limit bytes. Otherwise it returns its first limit bytes, without bytes that are
// not UTF-8, such as the half of a character at the end, and "...".
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}
