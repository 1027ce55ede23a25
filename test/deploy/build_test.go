package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// build is a command with the variables of `make release`, and then environ.
func build(t *testing.T, environ []string, name string, args ...string) *exec.Cmd {
	t.Helper()
	variables := []string{"GO=go", "TAGS=some", "VERSION=1.2.3", "ARCHES=amd64", "FORMATS=deb", "SOURCE_DATE_EPOCH=1700000000", "GOFLAGS=-mod=mod"}
	return command(t, append(variables, environ...), name, args...)
}

// TestCleanEnvironment checks that variables and `go env -w` of the user do not change the bytes of a release,
// and that Go still finds modules. P1. A release has a version that packages, images and charts accept. P16.
func TestCleanEnvironment(t *testing.T) {
	t.Parallel()
	netns.Need(t, "git", "go")
	const script = `. tools/clean-environment
"$GO" env GOAMD64 GOARM64 GOARM GO386 GOFLAGS GOEXPERIMENT GOFIPS140 GOOS GOARCH GOWORK CGO_CFLAGS CGO_LDFLAGS CC
env | sed -n '/^\(GIT_DIR\|GZIP\|GODEBUG\|GO_EXTLINK_ENABLED\|LC_ALL\|TZ\)=/p' | sort
umask
echo "vcs $VCS"`
	settings := filepath.Join(t.TempDir(), "env")
	write(t, settings, "GOAMD64=v3\nGOARM64=v9.0\nGOFLAGS=-tags=other\nGOFIPS140=latest\nCGO_LDFLAGS=-s\nGOPRIVATE=private.example.com\n")
	others := []string{
		"GOENV=" + settings, "GOFLAGS=-race -tags=poison", "GOAMD64=v4", "GOARM=5", "GO386=softfloat", "GOEXPERIMENT=arenas", "GOOS=windows",
		"GOARCH=386", "GOWORK=/nonexistent", "CGO_CFLAGS=-O0", "CC=false", "GODEBUG=madvdontneed=1", "GO_EXTLINK_ENABLED=1", "GIT_DIR=/nonexistent",
		"GZIP=-1", "LC_ALL=C.UTF-8", "TZ=Asia/Tokyo",
	}
	clean := output(t, build(t, []string{"GOENV=off"}, "sh", "-euc", script))
	if got := output(t, build(t, others, "sh", "-euc", "umask 077\n"+script)); got != clean {
		t.Errorf("with variables of the user (+) and without (-):\n%s", cmp.Diff(clean, got))
	}
	if got := output(t, build(t, others, "sh", "-euc", ". tools/clean-environment; go env GOPRIVATE")); got != "private.example.com\n" {
		t.Errorf("GOPRIVATE of go env -w is %q", got)
	}
	for _, text := range []string{"v1.2.3", "1.2", "1.2.3 ", "1.2.3+build", "1.2.3;id", "latest", "1.2.3-"} {
		said, err := build(t, []string{"VERSION=" + text}, "sh", "-euc", ". tools/clean-environment").CombinedOutput()
		if err == nil || !strings.Contains(string(said), "want a version such as 0.2.0") {
			t.Errorf("%q: %v\n%s", text, err, said)
		}
	}
}

// TestSourceTime checks that a release has the time of its commit, and that an unpacked archive
// needs one, also inside of another repository. P1.
func TestSourceTime(t *testing.T) {
	t.Parallel()
	netns.Need(t, "git", "make")
	tree := t.TempDir()
	archive := filepath.Join(tree, "archive")
	for _, name := range []string{"tools", "archive/tools"} {
		if err := os.CopyFS(filepath.Join(tree, name), os.DirFS("../../tools")); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range []string{"init -q", "add tools", "commit -q -m all"} {
		output(t, command(t, []string{"GIT_CONFIG_GLOBAL=/dev/null", "GIT_COMMITTER_DATE=1700000000 +0200"}, "git",
			append([]string{"-C", tree, "-c", "user.name=test", "-c", "user.email=test@example.com"}, strings.Fields(args)...)...))
	}
	for dir, want := range map[string]string{tree: "1700000000\n", archive: ""} {
		if got := output(t, command(t, []string{"GIT_DIR=/nonexistent"}, filepath.Join(dir, "tools/commit-time"))); got != want {
			t.Errorf("the time of %s is %q, want %q", dir, got, want)
		}
	}
	for _, c := range []struct{ dir, time, want string }{
		{archive, "", "want the time of the sources"}, {archive, "1700000000", "prints no commit"}, {tree, "1700000000", "prints +dirty"},
	} {
		text, err := build(t, []string{"SOURCE_DATE_EPOCH=" + c.time}, filepath.Join(c.dir, "tools/binaries")).CombinedOutput()
		if err == nil || !strings.Contains(string(text), c.want) { // there is no Makefile
			t.Errorf("%s: %v, want %q in:\n%s", c.dir, err, c.want, text)
		}
	}
}
