// Package clip shortens texts that come from outside before they are logged, kept or sent.
package clip

import "strings"

// Text returns text if it has at most limit bytes. Otherwise it returns the first limit bytes, followed by "...". It
// leaves out bytes that are not UTF-8, such as half a character at the cut.
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}
