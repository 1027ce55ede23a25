package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const interactions = "interactions.md"

var (
	// mechanismRow matches a row of the mechanisms' table, codePath a path in it, pairRow a
	// row of the pairs' table.
	mechanismRow = regexp.MustCompile(`(?m)^\| \*\*([^*|]+)\*\* \|.*\| (.*) \|$`)
	codePath     = regexp.MustCompile("`([^`]+)`")
	pairRow      = regexp.MustCompile(`(?m)^\| ([^*|]+) × ([^|]+) \| (.*) \|$`)
	testLink     = regexp.MustCompile(`\[((?:Test|Fuzz)\w+|[\w-]+\.txtar)\]\(\.\./([^)]+)\)`)
)

// cannotMeet begins the last cell of a pair that cannot meet, and the reason follows.
const cannotMeet = "cannot meet:"

// TestInteractions checks that every mechanism of interactions.md names files that exist,
// and that every pair of mechanisms has a row, with a link to a test that combines them or
// the reason why they cannot meet.
func TestInteractions(t *testing.T) {
	text, err := os.ReadFile(interactions)
	if err != nil {
		t.Fatal(err)
	}
	var mechanisms []string
	for _, row := range mechanismRow.FindAllStringSubmatch(string(text), -1) {
		mechanisms = append(mechanisms, row[1])
		for _, path := range codePath.FindAllStringSubmatch(row[2], -1) {
			if _, err := os.Stat(filepath.Join(root, filepath.FromSlash(path[1]))); err != nil {
				t.Errorf("%s: %s: %v", interactions, row[1], err)
			}
		}
	}
	if len(mechanisms) < 2 {
		t.Fatalf("%s names %d mechanisms", interactions, len(mechanisms))
	}
	shownBy := map[[2]string]string{}
	for _, row := range pairRow.FindAllStringSubmatch(string(text), -1) {
		pair := [2]string{row[1], row[2]}
		if _, twice := shownBy[pair]; twice {
			t.Errorf("%s: %s × %s has two rows", interactions, row[1], row[2])
		}
		shownBy[pair] = row[3]
	}
	for i, first := range mechanisms {
		for _, second := range mechanisms[i+1:] {
			cell, ok := shownBy[[2]string{first, second}]
			delete(shownBy, [2]string{first, second})
			switch links := testLink.FindAllStringSubmatch(cell, -1); {
			case !ok:
				t.Errorf("%s: no row for %s × %s", interactions, first, second)
			case strings.HasPrefix(cell, cannotMeet) && len(cell) > len(cannotMeet)+1:
			case len(links) == 0:
				t.Errorf("%s: %s × %s: want a link to a test, or %q and the reason", interactions, first, second, cannotMeet)
			default:
				for _, link := range links {
					checkTest(t, link[1], link[2])
				}
			}
		}
	}
	for pair := range shownBy {
		t.Errorf("%s: %s × %s: want two of the mechanisms named above, in their order", interactions, pair[0], pair[1])
	}
}

// checkTest fails unless file, below the root, has the test.
func checkTest(t *testing.T, name, file string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(file)))
	switch {
	case err != nil:
		t.Errorf("%s: %v", interactions, err)
	case strings.HasSuffix(file, ".txtar"):
	case !strings.Contains(string(text), "func "+name+"("):
		t.Errorf("%s: %s has no %s", interactions, file, name)
	}
}
