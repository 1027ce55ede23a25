package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const interactions = root + "/test/interactions.md"

var (
	// mechanismRow matches a row of the mechanisms' table, codePath a path in it, pairRow a
	// row of the pairs' table.
	mechanismRow = regexp.MustCompile(`(?m)^\| \*\*([^*|]+)\*\* \|.*\| (.*) \|$`)
	codePath     = regexp.MustCompile("`([^`]+)`")
	pairRow      = regexp.MustCompile(`(?m)^\| ([^*|]+) × ([^|]+) \| (.*) \|$`)
	testLink     = regexp.MustCompile(`\[((?:Test|Fuzz)\w+|[\w-]+\.txtar)\]\(\.\./([^)]+)\)`)
)

// TestInteractions checks that the mechanisms of interactions.md name files that exist, and that each pair is of two of
// these mechanisms and has a link to a test that combines them.
func TestInteractions(t *testing.T) {
	text, err := os.ReadFile(interactions)
	if err != nil {
		t.Fatal(err)
	}
	order := map[string]int{}
	for _, row := range mechanismRow.FindAllStringSubmatch(string(text), -1) {
		order[row[1]] = len(order) + 1
		for _, path := range codePath.FindAllStringSubmatch(row[2], -1) {
			if _, err := os.Stat(filepath.Join(root, filepath.FromSlash(path[1]))); err != nil {
				t.Errorf("%s: %s: %v", interactions, row[1], err)
			}
		}
	}
	pairs := map[[2]string]bool{}
	for _, row := range pairRow.FindAllStringSubmatch(string(text), -1) {
		first, second := row[1], row[2]
		if pairs[[2]string{first, second}] {
			t.Errorf("%s: %s × %s has two rows", interactions, first, second)
		}
		pairs[[2]string{first, second}] = true
		if order[first] == 0 || order[second] <= order[first] {
			t.Errorf("%s: %s × %s: want two of the mechanisms named above, in their order", interactions, first, second)
		}
		links := testLink.FindAllStringSubmatch(row[3], -1)
		if len(links) == 0 {
			t.Errorf("%s: %s × %s: want a link to a test", interactions, first, second)
		}
		for _, link := range links {
			checkTest(t, link[1], link[2])
		}
	}
	if len(pairs) == 0 {
		t.Errorf("%s has no pairs", interactions)
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
