package docs_test

import (
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestImportRules checks that the linter has a rule for the imports of every package that
// other packages can import.
func TestImportRules(t *testing.T) {
	const linter = root + "/.golangci.yaml"
	text := read(t, linter)
	var config struct {
		Linters struct {
			Settings struct {
				Depguard struct {
					Rules map[string]struct{ Files []string }
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
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

// TestMakefileSources checks that `make install` builds again after a change of any package.
func TestMakefileSources(t *testing.T) {
	text := read(t, root+"/release.mk")
	line := regexp.MustCompile(`\$\(shell find (.*) -type f`).FindStringSubmatch(text)
	if line == nil {
		t.Fatal("release.mk: SOURCES finds no files")
	}
	directories := strings.Fields(line[1])
	for name := range packages(t) {
		top, _, _ := strings.Cut(name, "/")
		if !slices.Contains(directories, top) {
			t.Errorf("release.mk: SOURCES does not have the directory %s", top)
		}
	}
}

// packages returns the packages of the module that have code other than tests and their helpers.
func packages(t *testing.T) map[string]bool {
	t.Helper()
	noProduct := regexp.MustCompile(`^(bench|test|tools)(/|$)|/test(data|kit)(/|$)`)
	found := map[string]bool{}
	for _, file := range files(t, ".go") {
		dir := filepath.ToSlash(strings.TrimPrefix(filepath.Dir(file), root+string(filepath.Separator)))
		if !strings.HasSuffix(file, "_test.go") && !noProduct.MatchString(dir) {
			found[dir] = true
		}
	}
	return found
}
