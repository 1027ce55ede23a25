package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/version"
)

// named matches the version in the name of an image or a package, and in the lines that set it.
var named = regexp.MustCompile(`\bnametap(?:-init|-discovery)?[:_-]([0-9]+\.[0-9]+\.[0-9]+)\b|(?m)^(?:ARG VERSION=|VERSION +\?= |version: |appVersion: |- semver: )(.*)$`)

// TestVersionInFiles checks that all files name the version of a build without VERSION. P16.
func TestVersionInFiles(t *testing.T) {
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

// TestManifestsOfARelease writes the chart and the manifests of a release. They differ from the
// repository's by the version only, and a second build with other times and another umask is equal.
// P16.
func TestManifestsOfARelease(t *testing.T) {
	netns.Need(t, "tar", "gzip")
	tree := t.TempDir()
	for _, dir := range []string{"tools", "deploy/chart", "deploy/kubernetes"} {
		if err := os.CopyFS(filepath.Join(tree, dir), os.DirFS(filepath.Join("..", dir))); err != nil {
			t.Fatal(err)
		}
	}
	build := func(umask string) map[string]string {
		t.Helper()
		variables := []string{"GO=go", "TAGS=some", "VERSION=9.8.7", "ARCHES=amd64", "FORMATS=deb", "SOURCE_DATE_EPOCH=1700000000"}
		output(t, inEnvironment(t, variables, "sh", "-euc", "umask "+umask+"; exec "+filepath.Join(tree, "tools/manifests")))
		return contents(t, os.DirFS(filepath.Join(tree, "bin/release")))
	}
	got := build("022")
	output(t, command(t, nil, "chmod", "-R", "go-rwx", filepath.Join(tree, "deploy")))
	output(t, command(t, nil, "touch", "--date=2001-02-03", filepath.Join(tree, "deploy/chart/values.yaml")))
	if diff := cmp.Diff(got, build("077")); diff != "" {
		t.Errorf("the first build (-) and the second (+):\n%s", diff)
	}
	want := contents(t, os.DirFS("kubernetes"))
	for name, text := range want {
		delete(want, name)
		want["nametap-9.8.7-"+name] = images.ReplaceAllString(text, "${1}9.8.7")
	}
	chart := got["nametap-9.8.7.tgz"]
	delete(got, "nametap-9.8.7.tgz")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the manifests of the repository with the version (-) and the manifests of the release (+):\n%s", diff)
	}
	first, unpacked := untar(t, chart)
	want = map[string]string{}
	for name, text := range contents(t, os.DirFS("chart")) {
		want["nametap/"+name] = text
	}
	want["nametap/Chart.yaml"] = strings.ReplaceAll(want["nametap/Chart.yaml"], version.Release(), "9.8.7")
	if diff := cmp.Diff(want, unpacked); diff != "" || first != "nametap/Chart.yaml" {
		t.Errorf("the chart of the repository with the version (-) and the chart of the release (+), which begins with %s:\n%s", first, diff)
	}
}

// images matches the images of nametap in a manifest.
var images = regexp.MustCompile(`( image: nametap(?:-init|-discovery)?:)[0-9.]+`)

// contents returns the contents of all files by their paths.
func contents(t *testing.T, tree fs.FS) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(tree, path)
		all[path] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// untar returns the name of the first file of a compressed archive, and the contents of all.
func untar(t *testing.T, compressed string) (first string, all map[string]string) {
	t.Helper()
	content, err := gzip.NewReader(bytes.NewReader([]byte(compressed)))
	if err != nil {
		t.Fatal(err)
	}
	all = map[string]string{}
	for archive := tar.NewReader(content); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return first, all
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = header.Name
		}
		all[header.Name] = string(text)
		if header.Mode != 0o644 || header.Uid != 0 || header.ModTime.Unix() != 1700000000 {
			t.Errorf("%s has %+v", header.Name, header)
		}
	}
}

// TestRefusedVersions checks that a release has a version that packages, images and charts accept. P16.
func TestRefusedVersions(t *testing.T) {
	for _, text := range []string{"v1.2.3", "1.2", "1.2.3 ", "1.2.3+build", "1.2.3;id", "latest", "1.2.3-"} {
		variables := []string{"GO=go", "TAGS=some", "VERSION=" + text, "ARCHES=amd64", "FORMATS=deb", "SOURCE_DATE_EPOCH=1700000000"}
		said, err := inEnvironment(t, variables, "sh", "-euc", "cd ..; . tools/clean-environment").CombinedOutput()
		if err == nil || !strings.Contains(string(said), "want a version such as 0.2.0") {
			t.Errorf("%q: %v\n%s", text, err, said)
		}
	}
}
