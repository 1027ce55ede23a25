// Package docs_test checks the documents against the code: the rows of behaviour.md and
// their tests, links, and quoted messages.
package docs_test

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the texts of nametap explain")

const (
	table = "behaviour.md"
	root  = ".."
)

// rowNumber matches a row's number: the letter of its section and a number.
var rowNumber = regexp.MustCompile(`\b(?:[NAFCKRVIPDE][1-9][0-9]?|I0)\b`)

// tableRow matches a line of behaviour.md's tables: anchor, number, what and why.
var tableRow = regexp.MustCompile(`^\| (?:<a id="(\w+)"></a>)?([NAFCKRVIPDE][1-9][0-9]?|I0) \|(.*)\|$`)

// Citations are the places where rows are cited, by the number of the row.
type citations map[string]map[string]bool

func (c citations) add(text, place string) {
	for _, row := range rowNumber.FindAllString(text, -1) {
		if c[row] == nil {
			c[row] = map[string]bool{}
		}
		c[row][place] = true
	}
}

// TestBehaviourTable checks that every cited row is in behaviour.md, and that a test cites every row of behaviour.md.
func TestBehaviourTable(t *testing.T) {
	tests, others := collect(t)
	listed := map[string]bool{}
	for _, line := range documentLines(t, table) {
		cells := tableRow.FindStringSubmatch(line)
		if cells == nil {
			continue
		}
		row := cells[2]
		if listed[row] {
			t.Errorf("%s: row %s is there twice", table, row)
		}
		listed[row] = true
		if len(tests[row]) == 0 {
			t.Errorf("%s: row %s: want a test whose comment cites it", table, row)
		}
		if want := strings.ToLower(row); cells[1] != want {
			t.Errorf("%s: row %s has the anchor %q, want %q", table, row, cells[1], want)
		}
	}
	if len(listed) == 0 {
		t.Fatalf("%s has no rows", table)
	}
	for _, cited := range []citations{tests, others} {
		for row, places := range cited {
			if !listed[row] {
				t.Errorf("row %s is cited in %v and is not in %s", row, slices.Sorted(maps.Keys(places)), table)
			}
		}
	}
}

// collect returns the rows that tests cite, by "FILE TEST", and the rows that
// everything else cites, by file.
func collect(t *testing.T) (tests, others citations) {
	t.Helper()
	tests, others = citations{}, citations{}
	for _, file := range files(t, ".go", ".txtar") {
		name := filepath.ToSlash(strings.TrimPrefix(file, root+string(filepath.Separator)))
		var err error
		switch {
		case strings.HasPrefix(name, "docs/"): // comments there explain the rows' form
		case path.Ext(name) == ".txtar":
			err = collectComments(file, name, tests)
		default:
			err = collectGo(file, name, tests, others)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return tests, others
}

// collectGo adds what the comments of a Go file cite: citations of a test, in front of
// it, inside it or behind its first line, to tests, all other citations to others.
func collectGo(file, name string, tests, others citations) error {
	positions := token.NewFileSet()
	parsed, err := parser.ParseFile(positions, file, nil, parser.ParseComments)
	if err != nil {
		return err
	}
	for _, group := range parsed.Comments {
		place, cited := name, others
		if test := testAround(parsed, group); test != "" {
			place, cited = name+" "+test, tests
		}
		cited.add(group.Text(), place)
	}
	return nil
}

// testAround returns the name of the test, benchmark, fuzz target or example that a
// comment belongs to, empty if there is none.
func testAround(file *ast.File, comment *ast.CommentGroup) string {
	for _, declaration := range file.Decls {
		f, ok := declaration.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !testName.MatchString(f.Name.Name) {
			continue
		}
		start := f.Pos()
		if f.Doc != nil {
			start = f.Doc.Pos()
		}
		if start <= comment.Pos() && comment.End() <= f.End() {
			return f.Name.Name
		}
	}
	return ""
}

var testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)`)

// collectComments adds what the comments of a test script cite.
func collectComments(file, name string, tests citations) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "-- ") {
			break // the script's files follow
		}
		if strings.HasPrefix(line, "#") {
			tests.add(line, name+" "+path.Base(name))
		}
	}
	return nil
}
