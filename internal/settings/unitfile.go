package settings

import (
	"regexp"
	"strings"
)

var (
	// assignment matches a variable in a file for EnvironmentFile=: its name, the quoted parts of its value, and then
	// a part without quotes, up to the end of the line. A quote that is open at the end of the file is closed there.
	assignment = regexp.MustCompile(`(?ms)^[ \t]*([^\s=#;][^=\n\r]*)=` +
		`((?:[ \t]*(?:'[^']*(?:'|\z)|"(?:[^"\\]|\\.)*(?:"|\z)))*)[ \t]*((?:\\.|[^\n\r\\])*)`)
	// quoted matches a quoted part of a value.
	quoted = regexp.MustCompile(`(?s)'([^']*)'?|"((?:[^"\\]|\\.)*)"?`)
	// word matches a word of the property Environment, which may be in double quotes.
	word = regexp.MustCompile(`"((?:[^"\\]|\\.)*)"|[^ "]+`)

	// In double quotes, a backslash is kept before most characters.
	escape, escapeInQuotes = regexp.MustCompile(`(?s)\\.`), regexp.MustCompile("\\\\[\"\\\\`$\n]")
)

// ParseEnvironmentFile returns the variables ("KEY=value") of a file that a unit of systemd names in
// EnvironmentFile=. It reads the file as systemd does (systemd.exec(5)). Nothing is expanded. Quotes count only at
// the beginning of a value. A backslash at the end of a line continues the value. Lines that begin with "#" or ";",
// and lines without "=", are skipped. No library reads this form: libraries for shells and for .env files expand
// variables and know "export".
func ParseEnvironmentFile(text string) []string {
	var found []string
	for _, match := range assignment.FindAllStringSubmatch(text, -1) {
		parts := []string{strings.TrimRight(match[1], " \t"), "="}
		for _, part := range quoted.FindAllStringSubmatch(match[2], -1) {
			parts = append(parts, part[1], unescape(escapeInQuotes, part[2]))
		}
		found = append(found, strings.Join(parts, "")+unescape(escape, strings.TrimRight(match[3], " \t")))
	}
	return found
}

// ParseEnvironment returns the variables of the property Environment of a unit. text is the property as
// `systemctl show` prints it: words, some of them in double quotes.
func ParseEnvironment(text string) []string {
	var found []string
	for _, match := range word.FindAllStringSubmatch(text, -1) {
		if match[0][0] == '"' {
			match[0] = unescape(escapeInQuotes, match[1])
		}
		found = append(found, match[0])
	}
	return found
}

// unescape takes out the backslashes that escapes matches, and line breaks after them.
func unescape(escapes *regexp.Regexp, text string) string {
	return escapes.ReplaceAllStringFunc(text, func(escaped string) string { return strings.Trim(escaped[1:], "\n") })
}
