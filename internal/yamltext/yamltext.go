// Package yamltext splits a text into YAML documents, and says where the YAML library found an error.
package yamltext

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A Document is one of the YAML documents in a text.
type Document struct {
	Marker []byte // the line that begins the document, or only its "---" if the body begins on the same line
	Body   []byte // the text after the marker. If a line that begins with "..." ends the document, Body includes it.
	Before int    // the number of lines before the body
}

// Split returns the documents of a text. A line that begins with "---" or "..." separates documents wherever it is,
// also in a quoted text (YAML 1.2.2, 9.1.2 and 9.1.4), so a syntax error in one document does not hide the next
// document. As in kubectl, a comment may follow "---" without a space. The documents share the memory of text.
func Split(text []byte) []*Document {
	var documents []*Document
	d, begin, end, number := &Document{}, 0, 0, 0 // d has the lines from begin to end
	finish := func(next *Document) {
		d.Body = text[begin:end:end]
		if len(d.Marker)+len(d.Body) > 0 {
			documents = append(documents, d)
		}
		d, begin = next, end
	}
	for line := range bytes.Lines(text) {
		number++
		switch {
		case isMarker(line, "---") || bytes.HasPrefix(line, []byte("---#")):
			finish(&Document{Marker: line, Before: number})
			begin += len(line)
			if content := bytes.TrimSpace(line[3:]); len(content) > 0 && content[0] != '#' {
				d.Marker, d.Before = line[:3], number-1
				begin = end + 3
			}
			end += len(line)
		case isMarker(line, "..."):
			end += len(line)
			finish(&Document{Before: number})
		default:
			end += len(line)
		}
	}
	finish(nil)
	return documents
}

// isMarker reports whether a line begins with marker, and white space or the end of the line follows.
func isMarker(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0)
}

// Blank reports whether a body has only comments, directives and the end of the document. Lines end as in the library.
func Blank(body []byte) bool {
	isBreak := func(r rune) bool { return strings.ContainsRune("\n\r\u0085\u2028\u2029", r) }
	for line := range bytes.FieldsFuncSeq(body, isBreak) {
		trimmed := bytes.TrimSpace(line)
		if len(trimmed) > 0 && trimmed[0] != '#' && trimmed[0] != '%' && !isMarker(line, "...") {
			return false
		}
	}
	return true
}

// The forms of errors of the YAML library.
var (
	errorLine     = regexp.MustCompile(`^line (\d+): `)
	parserMessage = regexp.MustCompile(`^did not find expected (key|node|<document|')`)
)

// Cause splits an error of the YAML library into the line of the body, counted from 1, and the message. The line is 0 if
// it is not known. The library's parser counts lines from 0, but its scanner from 1. Only the message shows whether
// the error is from the parser or the scanner.
func Cause(err error) (line int, message string) {
	message = strings.TrimPrefix(err.Error(), "yaml: ")
	if match := errorLine.FindStringSubmatch(message); match != nil {
		line, _ = strconv.Atoi(match[1]) // it is a number
		message = message[len(match[0]):]
	}
	if parserMessage.MatchString(message) {
		line++ // the parser counts from 0; an error in the first line has no number
	}
	if strings.Contains(message, "found a tab") || strings.Contains(message, "found character that cannot start any token") {
		message += " (want spaces before the text of a line, not a tab)"
	}
	return line, message
}

// goType matches the name of a Go type at the end of an error.
var goType = regexp.MustCompile(` (into|in type) (\*|\[\])*(\w+\.\w+|struct \{.*)`)

// OneLine returns an error of the YAML library as one line, without the names of Go types and with the line of [Cause].
// It returns other errors as they are.
func OneLine(err error) error {
	if mismatch := new(yaml.TypeError); errors.As(err, &mismatch) {
		lines := slices.Clone(mismatch.Errors)
		for i, line := range lines {
			lines[i] = goType.ReplaceAllString(line, "")
		}
		return errors.New(strings.Join(lines, "; "))
	}
	if !strings.HasPrefix(err.Error(), "yaml: ") {
		return err
	}
	line, message := Cause(err)
	if line == 0 {
		return fmt.Errorf("not valid YAML: %s", message)
	}
	return fmt.Errorf("line %d: not valid YAML: %s", line, message)
}
