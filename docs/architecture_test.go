package docs_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const (
	architecture = root + "/ARCHITECTURE.md"
	contributing = root + "/CONTRIBUTING.md"
	linter       = root + "/.golangci.yaml"
)

var (
	namedPath  = regexp.MustCompile("`([a-z][\\w/-]*(?:\\.\\w+)?)`") // a path, or a package and a name in it, in backquotes
	listedFile = regexp.MustCompile(`(?m)^//\t(\w+\.go)\s`)          // a Go file in the list of a package comment
)

// TestImportRules checks that the linter has a rule for the imports of every package that
// other packages can import.
func TestImportRules(t *testing.T) {
	text, err := os.ReadFile(linter)
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Linters struct {
			Settings struct {
				Depguard struct {
					Rules map[string]struct{ Files []string }
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	var patterns []string
	for _, rule := range config.Linters.Settings.Depguard.Rules {
		patterns = append(patterns, rule.Files...)
	}
	for name := range packages(t) {
		if strings.HasPrefix(name, "cmd/") || strings.HasPrefix(name, "internal/") || name == "examples" {
			continue
		}
		if !slices.ContainsFunc(patterns, func(pattern string) bool {
			pattern, anywhere := strings.CutPrefix(pattern, "**/")
			matched, err := path.Match(pattern, name+"/x.go")
			return anywhere && matched && err == nil
		}) {
			t.Errorf("%s: depguard has no rule for the files of %s", linter, name)
		}
	}
}

// TestNamedCode checks that the files, the directories and the declarations that ARCHITECTURE.md and CONTRIBUTING.md
// name exist, and that CONTRIBUTING.md says for ten changes or more where they begin.
func TestNamedCode(t *testing.T) {
	for _, document := range []string{architecture, contributing} {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		named := namedPath.FindAllStringSubmatch(string(text), -1)
		if len(named) == 0 {
			t.Errorf("%s names no code", document)
		}
		for _, match := range named {
			dir, name, _ := strings.Cut(match[1], ".")
			info, err := os.Stat(filepath.Join(root, filepath.FromSlash(dir)))
			switch isDir := err == nil && info.IsDir(); {
			case isDir && name == "":
			case isDir:
				if !declares(t, dir, name) {
					t.Errorf("%s: %s declares no %s", document, dir, name)
				}
			case strings.Contains(dir, "/"): // a file, or a directory that is not there
				if _, err := os.Stat(filepath.Join(root, filepath.FromSlash(match[1]))); err != nil {
					t.Errorf("%s: %v", document, err)
				}
			}
		}
	}
	_, text, found := strings.Cut(strings.Join(documentLines(t, contributing), "\n"), "| change | begins at |\n")
	rows, _, _ := strings.Cut(text, "\n\n")
	if n := strings.Count(rows, "\n"); !found || n < 10 {
		t.Errorf("%s says for %d changes where they begin, want 10", contributing, n)
	}
}

// declares reports whether the package in dir has a type, a function or a method of that name.
func declares(t *testing.T, dir, name string) bool {
	t.Helper()
	declaration := regexp.MustCompile(`(?m)^(?:type|func|func \([^)]*\)) ` + name + `\b`)
	sources, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(dir), "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(sources, func(source string) bool {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		return !strings.HasSuffix(source, "_test.go") && declaration.Match(text)
	})
}

// TestPackageFiles checks that the package comments that list the files of their package
// have every file, and no others.
func TestPackageFiles(t *testing.T) {
	for _, name := range []string{"agent", "dnsproxy", "dnsproxy/forward", "dnsproxy/table", "egress", "iptables", "nds"} {
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name), "doc.go"))
		if err != nil {
			t.Fatal(err)
		}
		var listed []string
		for _, match := range listedFile.FindAllSubmatch(text, -1) {
			listed = append(listed, string(match[1]))
		}
		files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(name), "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, file := range files {
			if base := filepath.Base(file); base != "doc.go" && !strings.HasSuffix(base, "_test.go") {
				want = append(want, base)
			}
		}
		slices.Sort(listed)
		slices.Sort(want)
		if !slices.Equal(listed, want) {
			t.Errorf("%s/doc.go lists the files %q, want %q", name, listed, want)
		}
	}
}

// TestMakefileSources checks that `make install` builds again after a change of any package.
func TestMakefileSources(t *testing.T) {
	text, err := os.ReadFile(root + "/release.mk")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`\$\(shell find (.*) -type f`).FindSubmatch(text)
	if line == nil {
		t.Fatal("release.mk: SOURCES finds no files")
	}
	directories := strings.Fields(string(line[1]))
	for name := range packages(t) {
		top, _, _ := strings.Cut(name, "/")
		if !slices.Contains(directories, top) {
			t.Errorf("release.mk: SOURCES does not have the directory %s", top)
		}
	}
}

// packages returns the packages of the module that have code other than tests.
func packages(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			return skipOtherModules(file)
		case filepath.Ext(file) == ".go" && !strings.HasSuffix(file, "_test.go"):
			found[filepath.ToSlash(strings.TrimPrefix(filepath.Dir(file), root+string(filepath.Separator)))] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// skipOtherModules makes WalkDir skip a directory that is no part of the module's code.
func skipOtherModules(dir string) error {
	if dir == root {
		return nil
	}
	if base := filepath.Base(dir); base == ".git" || base == "testdata" || base == "test" || base == "testkit" {
		return filepath.SkipDir
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
		return filepath.SkipDir
	}
	return nil
}
