package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// link matches a link to a file of the repository, with or without an anchor.
	link = regexp.MustCompile(`\]\(([^):\s]*)\)`)
	// reference matches the path of a document in a file that is none, with or without an anchor.
	reference = regexp.MustCompile(`\b(docs/[\w-]+\.(?:md|yaml))(?:#([\w-]+))?`)
	// heading matches a heading, anchor an anchor of a row.
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	anchor  = regexp.MustCompile(`<a id="([^"]+)">`)
	// dropped matches the characters that GitHub leaves out of a heading's anchor.
	dropped = regexp.MustCompile("[^a-z0-9 _-]")
)

// TestLinks checks that every link of a Markdown file to a file of the repository, and to
// a heading or a row in it, leads somewhere.
func TestLinks(t *testing.T) {
	anchors := map[string]map[string]bool{}
	for _, file := range files(t, ".md") {
		text := read(t, file)
		for _, match := range link.FindAllStringSubmatch(text, -1) {
			path, anchor, _ := strings.Cut(match[1], "#")
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), filepath.FromSlash(path))
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link to %s: %v", file, match[1], err)
				continue
			}
			if anchor == "" {
				continue
			}
			if anchors[target] == nil {
				anchors[target] = anchorsOf(t, target)
			}
			if !anchors[target][anchor] {
				t.Errorf("%s: link to %s: %s has no such anchor", file, match[1], target)
			}
		}
	}
}

// TestReferences checks that the documents, and the headings and rows in them, exist that code, manifests and units name.
func TestReferences(t *testing.T) {
	found := 0
	for _, file := range files(t, ".go", ".yaml", ".tpl", ".txtar", ".service", ".socket", ".default", ".conf", ".mk") {
		text := read(t, file)
		for _, match := range reference.FindAllStringSubmatch(text, -1) {
			found++
			document := filepath.Join(root, match[1])
			if _, err := os.Stat(document); err != nil {
				t.Errorf("%s: %v", file, err)
			} else if match[2] != "" && !anchorsOf(t, document)[match[2]] {
				t.Errorf("%s: %s has no anchor %s", file, document, match[2])
			}
		}
	}
	if found == 0 {
		t.Error("no file names a document")
	}
}

// files returns the paths of the repository's files with one of these extensions.
func files(t *testing.T, extensions ...string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && entry.Name() == ".git":
			return filepath.SkipDir
		case slices.Contains(extensions, filepath.Ext(path)):
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Fatalf("no %s file found", extensions)
	}
	return found
}

// anchorsOf returns the anchors of a Markdown file: the anchors of its headings, made as
// GitHub makes them, and of its rows.
func anchorsOf(t *testing.T, file string) map[string]bool {
	t.Helper()
	text := read(t, file)
	anchors := map[string]bool{}
	for _, match := range heading.FindAllStringSubmatch(text, -1) {
		slug := dropped.ReplaceAllString(strings.ToLower(match[1]), "")
		anchors[strings.ReplaceAll(slug, " ", "-")] = true
	}
	for _, match := range anchor.FindAllStringSubmatch(text, -1) {
		anchors[match[1]] = true
	}
	return anchors
}
