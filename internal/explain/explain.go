// Package explain has texts that explain what a command or the log prints. The texts are from the documents of this
// version: the rows of docs/behaviour.md, the problems of docs/problems.md, and the symptoms and the extended DNS errors of
// docs/operations.md. They are a part of the program, so reading them needs no network.
//
// The texts are in entries.gz, which `make generate` writes from the documents.
package explain

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

//go:embed entries.gz
var packed []byte

// A Kind is what an entry explains.
type Kind string

// The kinds of entries.
const (
	Row     Kind = "row"     // of docs/behaviour.md
	Symptom Kind = "symptom" // of docs/operations.md
	Code    Kind = "code"    // an extended DNS error (RFC 8914)
	Problem Kind = "problem" // of docs/problems.md
)

// An Entry explains one thing.
type Entry struct {
	Kind Kind `json:"kind"`
	// ID is the number of a row or of an error, or the code of a problem; empty for a symptom.
	ID string `json:"id,omitempty"`
	// Section is the heading above the text in the document.
	Section string `json:"section,omitempty"`
	// Title is the symptom, or the name of the code; empty for a row.
	Title string `json:"title,omitempty"`
	Text  string `json:"text"`
	// Why is the reason for a row, or the alert of a problem; it may be empty.
	Why string `json:"why,omitempty"`
	// Document is the path of the document, with its anchor.
	Document string `json:"document,omitempty"`
}

// Entries returns all entries, in the order of the documents.
func Entries() ([]Entry, error) {
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("reading the documents in this program: %w", err)
	}
	var entries []Entry
	if err := json.NewDecoder(r).Decode(&entries); err != nil {
		return nil, fmt.Errorf("reading the documents in this program: %w", err)
	}
	return entries, nil
}

var (
	// rowID matches the number of a row, codeID the number of an extended DNS error.
	rowID  = regexp.MustCompile(`^(?i:[a-z][0-9]+)$`)
	codeID = regexp.MustCompile(`^(?i:ede)?([0-9]+)$`)
	// quoted matches a message that a text quotes. digits matches numbers, in which two such messages may differ.
	quoted = regexp.MustCompile(`"([^"]{8,})"`)
	digits = regexp.MustCompile(`[0-9]+`)
)

// Find returns the entries for words that a command or a log prints. The words are numbers of rows, such as N9,
// numbers of extended DNS errors, such as 22, or other text, such as a message. For other text, Find returns the
// entries that match best.
func Find(entries []Entry, words []string) []Entry {
	text := strings.Join(words, " ")
	var found []Entry
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" ,()[]", r) }) {
		if strings.EqualFold(word, "EDE") {
			continue
		}
		one := numbered(entries, word)
		switch {
		case one != nil:
			found = append(found, *one)
		case word == text && (rowID.MatchString(word) || codeID.MatchString(word)):
			return nil
		default:
			return matching(entries, text)
		}
	}
	return found
}

// numbered returns the row, the problem or the error with a number or a code, or nil if there is none.
func numbered(entries []Entry, word string) *Entry {
	for i := range entries {
		if entries[i].Kind == Problem && strings.EqualFold(entries[i].ID, word) {
			return &entries[i]
		}
	}
	kind, id := Row, strings.ToUpper(word)
	if match := codeID.FindStringSubmatch(word); match != nil {
		kind, id = Code, match[1]
	} else if !rowID.MatchString(word) {
		return nil
	}
	for i := range entries {
		if entries[i].Kind == kind && entries[i].ID == id {
			return &entries[i]
		}
	}
	return nil
}

// How well an entry matches a text.
const (
	matchNone  = iota
	matchWords // all words are in the entry
	matchTitle // all words are in the entry's title
	matchQuote // the entry is about a message in the text
)

// matching returns the entries that match a text best.
func matching(entries []Entry, text string) []Entry {
	text = fold(text)
	var words []*regexp.Regexp
	for _, word := range strings.Fields(text) {
		words = append(words, regexp.MustCompile(`(?:^|\W)`+regexp.QuoteMeta(word))) // at the beginning of a word
	}
	if len(words) == 0 {
		return nil
	}
	best := matchWords
	var found []Entry
	for i := range entries {
		switch how := match(&entries[i], text, words); {
		case how > best:
			best, found = how, []Entry{entries[i]}
		case how == best:
			found = append(found, entries[i])
		}
	}
	return found
}

// fold returns text in a form for comparison: texts that differ only in case, numbers or quotation marks are equal
// after fold.
func fold(text string) string {
	return digits.ReplaceAllString(strings.NewReplacer("`", "", "\"", "").Replace(strings.ToLower(text)), "#")
}

func match(e *Entry, text string, words []*regexp.Regexp) int {
	if e.Kind != Row {
		for _, message := range append(quoted.FindAllStringSubmatch(e.Title+" "+e.Text, -1), codeName(e)...) {
			if strings.Contains(text, fold(message[1])) {
				return matchQuote
			}
		}
	}
	switch {
	case e.Title != "" && containsAll(fold(e.Title), words):
		return matchTitle
	case containsAll(fold(strings.Join([]string{e.Title, e.Text, e.Why}, " ")), words):
		return matchWords
	}
	return matchNone
}

// codeName returns the name of an extended DNS error, in the form that a match of the variable quoted has. Output
// about such an error contains the name, just as other output contains a quoted message. For other entries, and
// for a name of a single word, codeName returns nothing.
func codeName(e *Entry) [][]string {
	if e.Kind != Code || len(strings.Fields(e.Title)) < 2 {
		return nil
	}
	return [][]string{{e.Title, e.Title}}
}

func containsAll(text string, words []*regexp.Regexp) bool {
	return !slices.ContainsFunc(words, func(word *regexp.Regexp) bool { return !word.MatchString(text) })
}
