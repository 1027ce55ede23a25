package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pronoun matches phrases whose pronoun makes the reader look for the noun, and phrases that
// stand for a verb.
var pronoun = regexp.MustCompile(strings.ReplaceAll(
	`(?i)\b(those of|that of|the one that|those that|says that|put to use|put into use|of now|that is to say)\b`, " ", `\s+`))

const (
	// maxPronouns is how many of these phrases the comments of Go files may have in 10,000 lines.
	// Package net of Go has 3.
	maxPronouns = 60
	// maxDocumentPronouns is how many documents may have in 10,000 words.
	maxDocumentPronouns = 1
)

// TestPronouns checks that comments repeat the noun: "the Service's ports" instead of "those of
// the Service" (CONTRIBUTING.md, "English").
func TestPronouns(t *testing.T) {
	var hits []string
	lines := 0
	for _, file := range files(t, ".go") {
		if strings.Contains(file, "/testdata/") {
			continue
		}
		found, n := pronouns(t, file)
		hits, lines = append(hits, found...), lines+n
	}
	share := len(hits) * 10_000 / lines
	t.Logf("%d phrases in %d lines of comments: %d in 10,000", len(hits), lines, share)
	if share > maxPronouns {
		t.Errorf("%d phrases with a pronoun in 10,000 lines of comments, want at most %d: repeat the noun, or use the verb\n%s",
			share, maxPronouns, strings.Join(hits, "\n"))
	}
}

// TestDocumentPronouns checks the same in documents.
func TestDocumentPronouns(t *testing.T) {
	var hits []string
	words := 0
	for _, file := range files(t, ".md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		words += len(strings.Fields(string(text)))
		for _, at := range pronoun.FindAllIndex(text, -1) {
			line := 1 + strings.Count(string(text[:at[0]]), "\n")
			hits = append(hits, fmt.Sprintf("%s:%d: %s", strings.TrimPrefix(file, root+"/"), line, text[at[0]:at[1]]))
		}
	}
	share := len(hits) * 10_000 / words
	t.Logf("%d phrases in %d words of documents: %d in 10,000", len(hits), words, share)
	if share > maxDocumentPronouns {
		t.Errorf("%d phrases with a pronoun in 10,000 words of documents, want at most %d: repeat the noun, or use the verb\n%s",
			share, maxDocumentPronouns, strings.Join(hits, "\n"))
	}
}

// pronouns returns the phrases in the comments of a Go file, each with its line, and the number of
// lines of comments; nothing for a generated file.
func pronouns(t *testing.T, file string) (hits []string, lines int) {
	t.Helper()
	positions := token.NewFileSet()
	parsed, err := parser.ParseFile(positions, file, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	if ast.IsGenerated(parsed) {
		return nil, 0
	}
	for _, group := range parsed.Comments {
		var text strings.Builder
		for _, comment := range group.List {
			text.WriteString(strings.TrimPrefix(comment.Text, "//") + "\n")
		}
		first := positions.Position(group.Pos()).Line
		lines += strings.Count(text.String(), "\n")
		for _, at := range pronoun.FindAllStringIndex(text.String(), -1) {
			line := first + strings.Count(text.String()[:at[0]], "\n")
			phrase := strings.Join(strings.Fields(text.String()[at[0]:at[1]]), " ")
			hits = append(hits, fmt.Sprintf("%s:%d: %s", strings.TrimPrefix(file, root+"/"), line, phrase))
		}
	}
	return hits, lines
}

// wordsOfSentences are no names of parameters and results, because a doc comment such as "follow applies what changed
// since" cannot be read.
var wordsOfSentences = []string{"after", "again", "always", "before", "by", "how", "meanwhile", "of", "said", "since", "who", "why", "with", "without"}

// TestNames checks the parameters and results of functions, except of tests.
func TestNames(t *testing.T) {
	names := 0
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/testdata/") {
			continue
		}
		positions := token.NewFileSet()
		parsed, err := parser.ParseFile(positions, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, declaration := range parsed.Decls {
			function, ok := declaration.(*ast.FuncDecl)
			if !ok {
				continue
			}
			ast.Inspect(function.Type, func(n ast.Node) bool {
				field, ok := n.(*ast.Field)
				if !ok {
					return true
				}
				for _, name := range field.Names {
					if names++; slices.Contains(wordsOfSentences, name.Name) {
						t.Errorf("%s: %q is a word of sentences: name what it holds", positions.Position(name.Pos()), name.Name)
					}
				}
				return true
			})
		}
	}
	if names == 0 {
		t.Error("no names found")
	}
}
