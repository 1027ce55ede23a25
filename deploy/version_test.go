package deploy

import (
	"path/filepath"
	"regexp"
	"testing"

	"github.com/nametap/nametap/internal/version"
)

// named matches the version in the name of an image or a package, and in the lines that set it.
var named = regexp.MustCompile(`\bnametap(?:-init|-discovery)?[:_-]([0-9]+\.[0-9]+\.[0-9]+)\b|(?m)^(?:ARG VERSION=|VERSION +\?= |version: |appVersion: |- semver: )(.*)$`)

// TestVersionInFiles checks that all files name the version of a build without VERSION. P16.
func TestVersionInFiles(t *testing.T) {
	t.Parallel()
	files := []string{"../release.mk", "../Dockerfile", "../README.md", "chart/Chart.yaml", "packages/changelog.yaml"}
	for _, pattern := range []string{"kubernetes/*.yaml", "../docs/*.md", "../docs/*.yaml"} {
		more, err := filepath.Glob(pattern)
		if err != nil || len(more) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		files = append(files, more...)
	}
	found := map[string]int{}
	for _, name := range files {
		for _, match := range named.FindAllStringSubmatch(read(t, name), -1) {
			found[name]++
			if got := match[1] + match[2]; got != version.Release() {
				t.Errorf("%s: %q, want the version %s", name, match[0], version.Release())
			}
		}
	}
	for name, least := range map[string]int{
		"../release.mk": 1, "../Dockerfile": 4, "../README.md": 4, "chart/Chart.yaml": 2, "packages/changelog.yaml": 1, "kubernetes/discovery.yaml": 3,
		"kubernetes/istiod.yaml": 2, "../docs/packages.md": 2, "../docs/injection.md": 2,
	} {
		if found[name] < least {
			t.Errorf("%s names the version %d times, want %d", name, found[name], least)
		}
	}
}
