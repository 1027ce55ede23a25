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
	// number matches what may be the number of a row or of an extended DNS error.
	number = regexp.MustCompile(`^[A-Z]?[0-9]+$`)
	// quoted matches a message that a text quotes. digits matches numbers, in which two such messages may differ.
	quoted = regexp.MustCompile(`"([^"]{8,})"`)
	digits = regexp.MustCompile(`[0-9]+`)
)

// Find returns the entries for words that a command or a log prints: the entries whose numbers or codes the words are,
// such as N9, 22 or nameserver_down, or else those about a message in the text, or else those with all words.
func Find(entries []Entry, words []string) (found []Entry) {
	text := strings.Join(words, " ")
	for word := range strings.FieldsFuncSeq(strings.ToUpper(text), func(r rune) bool { return strings.ContainsRune(" ,()[]", r) }) {
		word = strings.TrimPrefix(word, "EDE")
		i := slices.IndexFunc(entries, func(e Entry) bool { return strings.EqualFold(e.ID, word) })
		switch {
		case word == "":
		case i >= 0:
			found = append(found, entries[i])
		case number.MatchString(word) && len(words) == 1:
			return nil
		default:
			if found = matching(entries, func(e Entry) bool { return e.quotes(text) }); len(found) == 0 {
				found = matching(entries, func(e Entry) bool { return e.hasWords(text) })
			}
			return found
		}
	}
	return found
}

func matching(entries []Entry, match func(Entry) bool) []Entry {
	return slices.DeleteFunc(slices.Clone(entries), func(e Entry) bool { return !match(e) })
}

// quotes reports whether the entry quotes a message that text contains, or is about the extended DNS error of that name.
func (e Entry) quotes(text string) bool {
	var messages []string
	for _, match := range quoted.FindAllStringSubmatch(e.Title+" "+e.Text, -1) {
		messages = append(messages, match[1])
	}
	if e.Kind == Code && strings.Contains(e.Title, " ") {
		messages = append(messages, e.Title)
	}
	fold := func(text string) string {
		return digits.ReplaceAllString(strings.NewReplacer("`", "", "\"", "").Replace(strings.ToLower(text)), "#")
	}
	return e.Kind != Row && slices.ContainsFunc(messages, func(m string) bool { return strings.Contains(fold(text), fold(m)) })
}

// hasWords reports whether the entry has all words of a text.
func (e Entry) hasWords(text string) bool {
	all := strings.ToLower(strings.Join([]string{e.Title, e.Text, e.Why}, " "))
	return !slices.ContainsFunc(strings.Fields(strings.ToLower(text)), func(word string) bool { return !strings.Contains(all, word) })
}
