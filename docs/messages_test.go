package docs_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var (
	// symptomRow matches a row of a table of symptoms and its first cell, quotation a
	// message quoted there.
	symptomRow = regexp.MustCompile(`(?m)^\| ([^|]*"[^|]*) \|`)
	quotation  = regexp.MustCompile(`"([^"]+)"`)
	// number matches what a message has where its format has a verb.
	number = regexp.MustCompile(`\d+`)
	// joint matches where the source splits a string.
	joint = regexp.MustCompile(`["` + "`" + `]\s*\+\s*["` + "`" + `]`)
)

// TestMessages checks that every message quoted as a symptom in operations.md is one that
// the programs write.
func TestMessages(t *testing.T) {
	const document = "operations.md"
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	source := source(t)
	found := 0
	for _, row := range symptomRow.FindAllStringSubmatch(string(text), -1) {
		for _, quoted := range quotation.FindAllStringSubmatch(row[1], -1) {
			found++
			message := regexp.QuoteMeta(quoted[1])
			pattern := number.ReplaceAllString(message, `(\d+|%d)`)
			if matched, err := regexp.MatchString(pattern, source); err != nil || !matched {
				t.Errorf("%s: no program has the message %q (%v)", document, quoted[1], err)
			}
		}
	}
	if found == 0 {
		t.Errorf("%s quotes no message", document)
	}
}

// source returns the Go source of the programs, with split strings joined.
func source(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
	return joint.ReplaceAllString(all.String(), "")
}
