package settings

import "strings"

// ParseEnvironmentFile returns the variables ("KEY=value") of a file that a unit of systemd names in
// EnvironmentFile=. It reads the file as systemd does (systemd.exec(5)). Nothing is expanded. Quotes count only at
// the beginning of a value. A backslash at the end of a line continues the value. Lines that begin with "#" or ";",
// and lines without "=", are skipped. No library reads this form: libraries for shells and for .env files expand
// variables and know "export".
func ParseEnvironmentFile(text string) []string {
	var found []string
	s := scanner{rest: text}
	for {
		s.rest = strings.TrimLeft(s.rest, blanks+newlines)
		if s.rest == "" {
			return found
		}
		if s.rest[0] == '#' || s.rest[0] == ';' {
			s.line()
			continue
		}
		end := strings.IndexAny(s.rest, "="+newlines)
		if end < 0 || s.rest[end] != '=' {
			s.line()
			continue
		}
		key := strings.TrimRight(s.rest[:end], blanks)
		s.rest = s.rest[end+1:]
		if value := s.value(); key != "" {
			found = append(found, key+"="+value)
		}
	}
}

// ParseEnvironment returns the variables of the property Environment of a unit. text is the property as
// `systemctl show` prints it: words, some of them in double quotes.
func ParseEnvironment(text string) []string {
	var found []string
	for s := (scanner{rest: text}); ; {
		s.rest = strings.TrimLeft(s.rest, blanks)
		switch {
		case s.rest == "":
			return found
		case s.rest[0] == '"':
			found = append(found, s.double())
		default:
			word, rest, _ := strings.Cut(s.rest, " ")
			found, s.rest = append(found, word), rest
		}
	}
}

const (
	blanks   = " \t"
	newlines = "\n\r"
)

// A scanner reads text.
type scanner struct{ rest string }

// line skips the rest of a line.
func (s *scanner) line() {
	if end := strings.IndexAny(s.rest, newlines); end >= 0 {
		s.rest = s.rest[end:]
		return
	}
	s.rest = ""
}

// value reads a value up to the end of its line: quoted parts, and then one part that is not quoted.
func (s *scanner) value() string {
	var value strings.Builder
	for {
		s.rest = strings.TrimLeft(s.rest, blanks)
		switch {
		case s.rest == "" || strings.ContainsRune(newlines, rune(s.rest[0])):
			return value.String()
		case s.rest[0] == '\'':
			quoted, rest, _ := strings.Cut(s.rest[1:], "'")
			value.WriteString(quoted)
			s.rest = rest
		case s.rest[0] == '"':
			value.WriteString(s.double())
		default:
			value.WriteString(s.unquoted())
			return value.String()
		}
	}
}

// double reads a text in double quotes. As in a shell, a backslash escapes a double quote, a backslash, a backquote and
// a dollar sign, and joins lines; a backslash before any other character is kept.
func (s *scanner) double() string {
	var text strings.Builder
	i := 1
	for ; i < len(s.rest) && s.rest[i] != '"'; i++ {
		if s.rest[i] != '\\' || i+1 == len(s.rest) {
			text.WriteByte(s.rest[i])
			continue
		}
		i++
		switch c := s.rest[i]; c {
		case '"', '\\', '`', '$':
			text.WriteByte(c)
		case '\n':
		default:
			text.WriteByte('\\')
			text.WriteByte(c)
		}
	}
	s.rest = s.rest[min(i+1, len(s.rest)):]
	return text.String()
}

// unquoted reads a text without quotes up to the end of its line, without the blanks at its end.
func (s *scanner) unquoted() string {
	var text strings.Builder
	end, i := 0, 0 // end is the length of the text without the blanks at its end
	for ; i < len(s.rest) && !strings.ContainsRune(newlines, rune(s.rest[i])); i++ {
		c := s.rest[i]
		if c == '\\' {
			if i++; i == len(s.rest) {
				break
			}
			if s.rest[i] != '\n' {
				text.WriteByte(s.rest[i])
			}
			end = text.Len()
			continue
		}
		text.WriteByte(c)
		if !strings.ContainsRune(blanks, rune(c)) {
			end = text.Len()
		}
	}
	s.rest = s.rest[i:]
	return text.String()[:end]
}
