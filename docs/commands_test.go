package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// target matches a target of a makefile, use the name of a command in the source of
	// cmd/nametap, subcommand a word that may be a command, and repositoryFile the path of a
	// file or a binary.
	target         = regexp.MustCompile(`(?m)^[\w/-]+:`)
	use            = regexp.MustCompile(`Use:\s*"([a-z]+)`)
	subcommand     = regexp.MustCompile(`^[a-z]+$`)
	repositoryFile = regexp.MustCompile(`^((deploy|examples)/[\w./-]+|bin/nametap[\w-]*)$`)
)

// TestCommands checks the commands in the code blocks of the documents for users: targets
// of make, subcommands and files must exist. The tests of cmd/nametap check the flags.
func TestCommands(t *testing.T) {
	var targets []string
	for _, makefile := range []string{"Makefile", "release.mk"} {
		text := read(t, filepath.Join(root, makefile))
		targets = append(targets, target.FindAllString(text, -1)...)
	}
	subcommands := subcommands(t)
	var commands int
	for _, document := range files(t, ".md") {
		text := read(t, document)
		for _, line := range codeLines(text) {
			words := strings.Fields(line)
			commands++
			for i, word := range words {
				switch next := append(words, "")[i+1]; {
				case word == "make" && i == 0 && !slices.Contains(targets, next+":"):
					t.Errorf("%s: %q: no makefile has the target %s", document, line, next)
				case word == "nametap" && i == 0 && subcommand.MatchString(next) && !subcommands[next]:
					t.Errorf("%s: %q: nametap has no command %s", document, line, next)
				case repositoryFile.MatchString(word):
					path := filepath.Join(root, strings.Replace(word, "bin/", "cmd/", 1))
					if _, err := os.Stat(path); err != nil {
						t.Errorf("%s: %q: %v", document, line, err)
					}
				}
			}
		}
	}
	if commands == 0 {
		t.Error("the documents have no commands")
	}
}

// codeLines returns the commands in the indented code blocks of a document, without their
// prompts and comments.
func codeLines(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if code, ok := strings.CutPrefix(line, "    "); ok {
			code, _, _ = strings.Cut(code, " #")
			lines = append(lines, strings.TrimPrefix(strings.TrimSpace(code), "$ "))
		}
	}
	return lines
}

// subcommands returns the names of the commands of nametap and of their subcommands.
func subcommands(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(root + "/cmd/nametap/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no source of cmd/nametap: %v", err)
	}
	names := map[string]bool{}
	for _, file := range files {
		text := read(t, file)
		for _, match := range use.FindAllStringSubmatch(text, -1) {
			names[match[1]] = true
		}
	}
	return names
}
