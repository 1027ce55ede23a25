// Package docs_test checks the documents against the code: the rows of behaviour.md and their tests, commands and links.
package docs_test

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the texts of nametap explain")

const (
	table = "behaviour.md"
	root  = ".."
)

var (
	// rowNumber matches a row's number: the letter of its section and a number.
	rowNumber = regexp.MustCompile(`\b(?:[NAFCKRVIPDEG][1-9][0-9]?|I0)\b`)
	// tableRow matches a line of behaviour.md's tables: anchor, number, what and why.
	tableRow = regexp.MustCompile(`^\| (?:<a id="(\w+)"></a>)?([NAFCKRVIPDEG][1-9][0-9]?|I0) \|(.*)\|$`)
	testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)`)
)

// TestBehaviourTable checks that every cited row is in behaviour.md, and that a test cites every row of behaviour.md.
func TestBehaviourTable(t *testing.T) {
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
		if want := strings.ToLower(row); cells[1] != want {
			t.Errorf("%s: row %s has the anchor %q, want %q", table, row, cells[1], want)
		}
	}
	if len(listed) == 0 {
		t.Fatalf("%s has no rows", table)
	}
	for _, file := range files(t, ".md") {
		for _, row := range rowNumber.FindAllString(read(t, file), -1) {
			if !listed[row] {
				t.Errorf("%s cites row %s, which is not in %s", file, row, table)
			}
		}
	}
	tested := map[string]bool{}
	for _, file := range files(t, ".go", ".txtar") {
		if strings.HasPrefix(file, root+"/docs/") { // comments there explain the rows' form
			continue
		}
		for _, c := range comments(t, file) {
			for _, row := range rowNumber.FindAllString(c.text, -1) {
				tested[row] = tested[row] || c.ofTest
				if !listed[row] {
					t.Errorf("%s cites row %s, which is not in %s", file, row, table)
				}
			}
		}
	}
	for row := range listed {
		if !tested[row] {
			t.Errorf("%s: row %s: want a test whose comment cites it", table, row)
		}
	}
}

// A comment is a comment of a Go file or a test script. It is of a test if it is in front of the test, in it, or behind its
// first line.
type comment struct {
	text   string
	ofTest bool
}

func comments(t *testing.T, file string) (found []comment) {
	t.Helper()
	if path.Ext(file) == ".txtar" {
		for _, line := range documentLines(t, file) {
			if strings.HasPrefix(line, "-- ") {
				break // the script's files follow
			}
			if strings.HasPrefix(line, "#") {
				found = append(found, comment{line, true})
			}
		}
		return found
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range parsed.Comments {
		found = append(found, comment{group.Text(), isOfTest(parsed, group)})
	}
	return found
}

func isOfTest(file *ast.File, comment *ast.CommentGroup) bool {
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
			return true
		}
	}
	return false
}

func documentLines(t *testing.T, path string) []string {
	t.Helper()
	return strings.Split(read(t, path), "\n")
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
