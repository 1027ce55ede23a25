package release_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/test/machines/lab"
)

// other is the version of a release that no file names.
const other = "9.8.7"

// namesOf returns the files of a release of one architecture, whose packages are deb.
func namesOf(version, arch string) []string {
	names := []string{
		"SHA256SUMS", "nametap-" + version + ".tgz", "nametap-init-" + version + "-debian.tar",
		"nametap-" + version + "-crds.yaml", "nametap-" + version + "-discovery.yaml", "nametap-" + version + "-istiod.yaml",
		"nametap-" + version + "-webhook.yaml", "kubectl-nametap-" + version + ".yaml",
	}
	for _, platform := range []string{"linux-amd64", "linux-arm64", "darwin-amd64", "darwin-arm64", "windows-amd64"} {
		names = append(names, "kubectl-nametap-"+version+"-"+platform+".tar.gz")
	}
	for _, name := range []string{"nametap", "nametap-discovery"} {
		names = append(names, name+"_"+version+"-1_"+arch+".deb", name+"-linux-"+arch, name+"-linux-"+arch+".cdx.json")
	}
	for _, name := range []string{"nametap", "nametap-init", "nametap-discovery"} {
		names = append(names, name+"-"+version+"-image.tar")
	}
	slices.Sort(names)
	return names
}

// TestVersion makes a release with another VERSION, from sources without a commit. All that a release has gets
// the version: programs, packages, images, the chart, the manifests, and what injection adds to pods. P16.
func TestVersion(t *testing.T) {
	tree, arch := t.TempDir(), runtime.GOARCH
	output(t, "sh", "-euc", `cd "$1"
git ls-files --cached --others --exclude-standard | tar --create --files-from=- | tar --extract --directory="$2"
mkdir "$2/bin"
[ ! -d bin/debs ] || cp -R bin/debs "$2/bin/"`, "sh", root, tree)
	output(t, "make", "--silent", "--directory="+tree, "release", "VERSION="+other, "ARCHES="+arch, "FORMATS=deb", "SOURCE_DATE_EPOCH=1700000000")
	built := filepath.Join(tree, "bin/release")
	entries, err := os.ReadDir(built)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if diff := cmp.Diff(namesOf(other, arch), names); diff != "" {
		t.Errorf("-want +built:\n%s", diff)
	}
	checkPrograms(t, tree, built)
	checkPackage(t, built)
	for _, name := range []string{"nametap", "nametap-init", "nametap-discovery"} {
		// The label is in the image's configuration.
		output(t, "grep", "--recursive", "--quiet", `"org.opencontainers.image.version":"`+other+`"`, filepath.Join(tree, "bin/images", name))
	}
	checkChart(t, built)
	checkRebuild(t, tree, built)
}

// checkPrograms checks what the programs print, and the images that `nametap inject` adds.
func checkPrograms(t *testing.T, tree, built string) {
	t.Helper()
	for _, name := range []string{"nametap", "nametap-discovery"} {
		program := filepath.Join(built, name+"-linux-"+runtime.GOARCH)
		if got := output(t, program, "version"); !regexp.MustCompile(`\bv9\.8\.7\b`).MatchString(got) {
			t.Errorf("%s version prints %s", name, got)
		}
	}
	pod := filepath.Join(t.TempDir(), "pod.yaml")
	const text = "apiVersion: v1\nkind: Pod\nmetadata: {name: app}\nspec: {containers: [{name: app, image: app}]}\n"
	if err := os.WriteFile(pod, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	injected := output(t, filepath.Join(tree, "bin/linux-"+runtime.GOARCH, "nametap"), "inject", "-f", pod)
	for _, want := range []string{"nametap:" + other, "nametap-init:" + other} {
		if !strings.Contains(injected, want) {
			t.Errorf("nametap inject does not add %s:\n%s", want, injected)
		}
	}
	page, err := os.ReadFile(filepath.Join(tree, "bin/share/nametap-discovery/man/man1/nametap-discovery-inject.1"))
	if err != nil || !strings.Contains(string(page), other) {
		t.Errorf("the manual page of nametap-discovery inject does not name %s (%v):\n%s", other, err, page)
	}
}

// checkPackage checks the version of the package and of its changelog.
func checkPackage(t *testing.T, built string) {
	t.Helper()
	path := filepath.Join(built, "nametap_"+other+"-1_"+runtime.GOARCH+".deb")
	if got := output(t, "dpkg-deb", "--field", path, "Version"); strings.TrimSpace(got) != other+"-1" {
		t.Errorf("the package has the version %s", got)
	}
	changelog := output(t, "sh", "-euc", `dpkg-deb --fsys-tarfile "$1" | tar --extract --to-stdout --wildcards '*/doc/nametap/changelog*.gz' | gunzip`, "sh", path)
	if !strings.HasPrefix(changelog, "nametap ("+other) {
		t.Errorf("the changelog of the package is\n%s", changelog)
	}
}

// checkChart renders the chart of the release with Helm. Its images equal the manifests' images,
// with the version.
func checkChart(t *testing.T, built string) {
	t.Helper()
	reference := regexp.MustCompile(`image: "?(nametap[^\s"]*)`)
	rendered := output(t, lab.Peer(t, "helm4"), "template", "nametap", filepath.Join(built, "nametap-"+other+".tgz"), "--kube-version=1.36.1")
	for name, text := range map[string]string{
		"the chart": rendered, "discovery.yaml": output(t, "cat", filepath.Join(built, "nametap-"+other+"-discovery.yaml")),
		"istiod.yaml": output(t, "cat", filepath.Join(built, "nametap-"+other+"-istiod.yaml")),
	} {
		found := reference.FindAllStringSubmatch(text, -1)
		for _, match := range found {
			if !strings.HasSuffix(match[1], ":"+other) {
				t.Errorf("%s has the image %s", name, match[1])
			}
		}
		if len(found) == 0 {
			t.Errorf("%s has no image", name)
		}
	}
}

// checkRebuild builds the init image again from the packages of Debian that the release has, without a mirror.
func checkRebuild(t *testing.T, tree, built string) {
	t.Helper()
	before := output(t, "sha256sum", filepath.Join(tree, "bin/images/nametap-init.tar"))
	debs := filepath.Join(tree, "bin/debs")
	if err := os.RemoveAll(debs); err != nil {
		t.Fatal(err)
	}
	build := func() ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "--directory="+tree, "image", "VERSION="+other, "ARCHES="+runtime.GOARCH, "SOURCE_DATE_EPOCH=1700000000")
		cmd.Env = append(os.Environ(), "DEBIAN_MIRROR=file:///nonexistent")
		return cmd.CombinedOutput()
	}
	if said, err := build(); err == nil {
		t.Errorf("the image is built without packages and without a mirror:\n%s", said)
	}
	output(t, "mkdir", "-p", debs)
	output(t, "tar", "--extract", "--file="+filepath.Join(built, "nametap-init-"+other+"-debian.tar"), "--directory="+debs)
	if said, err := build(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	if after := output(t, "sha256sum", filepath.Join(tree, "bin/images/nametap-init.tar")); after != before {
		t.Errorf("the image was %s and is now %s", before, after)
	}
}

// TestContents checks that bin/release has the files of VERSION for ARCHES, and no others. P16.
func TestContents(t *testing.T) {
	version := os.Getenv("VERSION")
	if version == "" {
		t.Fatal("VERSION is not set: run `make release-test`")
	}
	want := map[string]bool{}
	for arch, alias := range arches() {
		for _, name := range namesOf(version, arch) {
			want[name] = true
		}
		for _, name := range []string{"nametap", "nametap-discovery"} {
			want[name+"-"+version+"-1."+alias+".rpm"] = true
		}
	}
	got := map[string]bool{}
	for _, path := range glob(t, "*") {
		got[filepath.Base(path)] = true
	}
	delete(got, "SHA256SUMS.sig")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +built:\n%s", diff)
	}
}
