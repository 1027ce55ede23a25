package docs_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	entriesFile = root + "/cmd/nametap/explain.gz"

	symptomHeader = "| symptom | meaning |"
	codeHeader    = "| code | name | meaning |"
	problemHeader = "| problem | meaning | alert |"
)

var (
	// linked matches a link, of which the text is shown.
	linked = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	// errorCode matches the code of an extended DNS error in the source.
	errorCode = regexp.MustCompile(`dns\.ExtendedErrorCode([A-Z]\w+)\b`)
)

// An entry is what a document says about one thing, as `nametap explain` reads it.
type entry struct {
	ID       string `json:"id,omitempty"`
	Title    string `json:"title"`
	Text     string `json:"text"`
	Document string `json:"document"`
}

// TestBehaviourEntries checks that `nametap explain` has the rows, the symptoms and the extended DNS errors of the
// documents as they are. With -update it writes them.
func TestBehaviourEntries(t *testing.T) {
	want := slices.Concat(rowEntries(t), entriesOf(t, "operations.md"), entriesOf(t, "problems.md"))
	var got []entry
	unpacked, err := gzip.NewReader(strings.NewReader(read(t, entriesFile)))
	if err == nil {
		err = json.NewDecoder(unpacked).Decode(&got)
	}
	diff := cmp.Diff(want, got)
	if err == nil && diff == "" {
		return
	}
	if !*update {
		t.Fatalf("%s is not current: run `make generate` (-documents +file): %v\n%s", entriesFile, err, diff)
	}
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the level is valid
	_, err = w.Write(text)
	if err := errors.Join(err, w.Close(), os.WriteFile(entriesFile, packed.Bytes(), 0o644)); err != nil { //nolint:gosec // a document
		t.Fatal(err)
	}
}

// TestErrorCodes checks that operations.md explains every extended DNS error that the agent sends, and no other.
func TestErrorCodes(t *testing.T) {
	sent := map[string]bool{}
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, match := range errorCode.FindAllStringSubmatch(read(t, file), -1) {
			sent[match[1]] = true
		}
	}
	delete(sent, "ToString")
	documented := map[string]bool{}
	for _, e := range entriesOf(t, "operations.md") {
		if _, name, found := strings.Cut(e.Title, ", "); found && e.ID != "" {
			documented[strings.ReplaceAll(name, " ", "")] = true
		}
	}
	if diff := cmp.Diff(sent, documented); diff != "" {
		t.Errorf("operations.md (-sent +documented):\n%s", diff)
	}
}

// conditionCode matches the code of a problem in the source.
var conditionCode = regexp.MustCompile(`(?:condition\.Condition\{|\{|\s)Code: +"([a-z_]+)"|\bCode += "([a-z_]+)"`)

// R15: problems.md explains every problem that the agent and doctor find, and no other.
func TestProblemCodes(t *testing.T) {
	found := map[string]bool{}
	for _, file := range files(t, ".go") {
		if text := read(t, file); !strings.HasSuffix(file, "_test.go") && (strings.Contains(text, `/internal/condition"`) || strings.Contains(file, "/condition/")) {
			for _, match := range conditionCode.FindAllStringSubmatch(text, -1) {
				found[match[1]+match[2]] = true
			}
		}
	}
	documented := map[string]bool{}
	for _, e := range entriesOf(t, "problems.md") {
		documented[e.ID] = true
	}
	if diff := cmp.Diff(found, documented); diff != "" {
		t.Errorf("problems.md (-found +documented):\n%s", diff)
	}
}

// rowEntries returns the rows of behaviour.md.
func rowEntries(t *testing.T) []entry {
	t.Helper()
	var entries []entry
	section := ""
	for _, line := range documentLines(t, table) {
		if title, ok := strings.CutPrefix(line, "## "); ok {
			section = title
		}
		if row := tableRow.FindStringSubmatch(line); row != nil {
			cells := cellsOf("|" + row[3] + "|")
			if cells[1] != "" {
				cells[0] += " Why: " + cells[1]
			}
			entries = append(entries, entry{row[2], row[2] + " (" + section + ")", cells[0], "docs/behaviour.md#" + strings.ToLower(row[2])})
		}
	}
	return entries
}

// entriesOf returns the symptoms, the codes and the problems in the tables of a document.
func entriesOf(t *testing.T, document string) []entry {
	t.Helper()
	var entries []entry
	section, header := "", ""
	for _, line := range documentLines(t, document) {
		switch title, ok := strings.CutPrefix(line, "## "); {
		case ok:
			section = title
		case line == symptomHeader || line == codeHeader || line == problemHeader:
			header = line
		case !strings.HasPrefix(line, "|"):
			header = ""
		case header == "" || strings.HasPrefix(line, "|---"):
		default:
			slug := strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(section), ""), " ", "-")
			cells := cellsOf(line)
			e := entry{Title: cells[0], Text: cells[1], Document: strings.TrimSuffix("docs/"+document+"#"+slug, "#")}
			switch header {
			case codeHeader:
				e.ID, e.Title, e.Text = cells[0], "Extended DNS Error "+cells[0]+", "+cells[1], cells[2]
			case problemHeader:
				e.ID = strings.Trim(cells[0], "`")
				e.Title = "problem " + e.ID
				if cells[2] != "-" {
					e.Text += "; alert " + cells[2]
				}
			}
			entries = append(entries, e)
		}
	}
	return entries
}

// cellsOf returns the cells of a line of a table as plain text.
func cellsOf(line string) []string {
	const bar = "\x00"
	line = strings.ReplaceAll(linked.ReplaceAllString(line, "$1"), `\|`, bar)
	cells := strings.Split(strings.Trim(line, "|"), "|")
	for i := range cells {
		cells[i] = strings.ReplaceAll(strings.TrimSpace(cells[i]), bar, "|")
	}
	return cells
}
