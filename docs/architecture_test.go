package docs_test

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const (
	module       = "github.com/nametap/nametap/"
	architecture = root + "/ARCHITECTURE.md"
	contributing = root + "/CONTRIBUTING.md"
	linter       = root + "/.golangci.yaml"

	importsBegin = "<!-- imports: written by `make generate` -->\n"
	importsEnd   = "<!-- end of imports -->\n"
)

var (
	goFile     = regexp.MustCompile("`([\\w/-]+\\.go)`")    // a Go file in backquotes
	listedFile = regexp.MustCompile(`(?m)^//\t(\w+\.go)\s`) // a Go file in the list of a package comment
)

// TestImports checks that CONTRIBUTING.md lists the imports among the packages of the
// project as they are. With -update it writes the list.
func TestImports(t *testing.T) {
	text, err := os.ReadFile(contributing)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), importsBegin)
	got, after, ended := strings.Cut(rest, importsEnd)
	if !found || !ended {
		t.Fatalf("%s: want the lines %q and %q", contributing, importsBegin, importsEnd)
	}
	want := importTable(imports(t))
	if got == want {
		return
	}
	if !*update {
		t.Fatalf("%s: the imports have changed: run `make generate`\n got %s\nwant %s", contributing, got, want)
	}
	updated := before + importsBegin + want + importsEnd + after
	if err := os.WriteFile(contributing, []byte(updated), 0o644); err != nil { //nolint:gosec // a document
		t.Fatal(err)
	}
}

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
	for name := range imports(t) {
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

// TestArchitectureFiles checks that the files in ARCHITECTURE.md exist.
func TestArchitectureFiles(t *testing.T) {
	text, err := os.ReadFile(architecture)
	if err != nil {
		t.Fatal(err)
	}
	matches := goFile.FindAllStringSubmatch(string(text), -1)
	if len(matches) == 0 {
		t.Fatalf("%s has no files", architecture)
	}
	for _, match := range matches {
		if match[1] == "doc.go" { // of any package
			continue
		}
		if _, err := os.Stat(filepath.Join(root, filepath.FromSlash(match[1]))); err != nil {
			t.Errorf("%s: %v", architecture, err)
		}
	}
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
	for name := range imports(t) {
		top, _, _ := strings.Cut(name, "/")
		if !slices.Contains(directories, top) {
			t.Errorf("release.mk: SOURCES does not have the directory %s", top)
		}
	}
}

// imports returns the packages of the module that have code, each with the packages of
// the module that it imports. It leaves out tests and the helpers of tests.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	sets := map[string]map[string]bool{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			return skipOtherModules(file)
		case filepath.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go"):
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		name := filepath.ToSlash(strings.TrimPrefix(filepath.Dir(file), root+string(filepath.Separator)))
		if sets[name] == nil {
			sets[name] = map[string]bool{}
		}
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if imported, ok := strings.CutPrefix(imported, module); ok {
				sets[name][imported] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	packages := map[string][]string{}
	for name, set := range sets {
		packages[name] = slices.Sorted(maps.Keys(set))
	}
	return packages
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

// importTable returns the imports as a table of Markdown. Packages that import no other
// are in its last row.
func importTable(packages map[string][]string) string {
	var table strings.Builder
	table.WriteString("| package | imports |\n|---|---|\n")
	var without []string
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		if len(packages[name]) == 0 {
			without = append(without, name)
			continue
		}
		fmt.Fprintf(&table, "| %s | %s |\n", name, strings.Join(packages[name], ", "))
	}
	fmt.Fprintf(&table, "| %s | no other package of the project |\n", strings.Join(without, ", "))
	return table.String()
}
