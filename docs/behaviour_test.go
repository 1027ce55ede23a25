// Package docs_test checks the documents against the code: the rows of behaviour.md and
// their tests, the imports in CONTRIBUTING.md, links, and quoted messages.
package docs_test

import (
	"flag"
	"fmt"
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

var update = flag.Bool("update", false, "write the tests in behaviour.md and the imports in CONTRIBUTING.md")

const (
	table = "behaviour.md"
	root  = ".."
	// shown is how many tests of a row are named; the others are counted.
	shown = 6
	// noTest begins the last cell of a row that has no test, and the reason follows.
	noTest = "none:"
)

// rowNumber matches a row's number: the letter of its section and a number.
var rowNumber = regexp.MustCompile(`\b(?:[NAFCKRVIPDE][1-9][0-9]?|I0)\b`)

// tableRow matches a line of behaviour.md's tables: number, what and why, tests.
var tableRow = regexp.MustCompile(`^\| (<a id="\w+"></a>)?([NAFCKRVIPDE][1-9][0-9]?|I0) \|(.*)\|([^|]*)\|$`)

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

// TestBehaviourTable checks that every cited row is in behaviour.md, and that every row of
// behaviour.md names its tests or the reason why it has none. With -update it writes the
// column of tests.
func TestBehaviourTable(t *testing.T) {
	text, err := os.ReadFile(table)
	if err != nil {
		t.Fatal(err)
	}
	tests, others := collect(t)
	lines := strings.Split(string(text), "\n")
	listed := map[string]bool{}
	for i, line := range lines {
		cells := tableRow.FindStringSubmatch(line)
		if cells == nil {
			continue
		}
		row, current := cells[2], strings.TrimSpace(cells[4])
		if listed[row] {
			t.Errorf("%s: row %s is there twice", table, row)
		}
		listed[row] = true
		want := links(tests[row])
		if want == "" && strings.HasPrefix(current, noTest) {
			want = current
		}
		switch {
		case want == "":
			t.Errorf("%s: row %s: want a test whose comment cites it, or %q with the reason in the last column", table, row, noTest)
		case want != current && !*update:
			t.Errorf("%s: row %s: the tests are not current: run `make generate`\n got %s\nwant %s", table, row, current, want)
		}
		anchor := fmt.Sprintf(`<a id="%s"></a>`, strings.ToLower(row))
		lines[i] = fmt.Sprintf("| %s%s |%s| %s |", anchor, row, cells[3], want)
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
	if *update && !t.Failed() {
		if err := os.WriteFile(table, []byte(strings.Join(lines, "\n")), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
}

// links returns the last cell of a row: its tests, as links to their files.
func links(places map[string]bool) string {
	var named []string
	for _, place := range slices.Sorted(maps.Keys(places)) {
		if len(named) == shown {
			named = append(named, fmt.Sprintf("and %d more", len(places)-shown))
			break
		}
		file, name, _ := strings.Cut(place, " ")
		named = append(named, fmt.Sprintf("[%s](../%s)", name, file))
	}
	return strings.Join(named, ", ")
}

// collect returns the rows that tests cite, by "FILE TEST", and those that everything
// else cites, by file.
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

// collectGo adds what the comments of a Go file cite: those of a test, in front of it,
// inside it or behind its first line, to tests, all others to others.
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
