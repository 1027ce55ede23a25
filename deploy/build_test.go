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

// inEnvironment returns a command whose environment has what Go needs, and then environ.
func inEnvironment(t *testing.T, environ []string, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := command(t, nil, name, args...)
	cmd.Env = append(append(cmd.Env, "HOME="+os.Getenv("HOME"), "GOFLAGS=-mod=mod"), environ...)
	return cmd
}

// TestCleanEnvironment checks that variables and `go env -w` of the user do not change the bytes of a release,
// and that Go still finds modules. P1.
func TestCleanEnvironment(t *testing.T) {
	t.Parallel()
	netns.Need(t, "git")
	const script = `cd ..
. tools/clean-environment
"$GO" env GOAMD64 GOARM64 GOARM GO386 GOFLAGS GOEXPERIMENT GOFIPS140 GOOS GOARCH GOWORK CGO_CFLAGS CGO_LDFLAGS CC
env | sed -n '/^\(GIT_DIR\|GZIP\|GODEBUG\|GO_EXTLINK_ENABLED\|LC_ALL\|TZ\)=/p' | sort
umask
echo "vcs $VCS"`
	settings := filepath.Join(t.TempDir(), "env")
	write(t, settings, "GOAMD64=v3\nGOARM64=v9.0\nGOFLAGS=-tags=other\nGOFIPS140=latest\nCGO_LDFLAGS=-s\nGOPRIVATE=private.example.com\n")
	variables := []string{"GO=go", "TAGS=some", "VERSION=1.2.3", "ARCHES=amd64", "FORMATS=deb", "SOURCE_DATE_EPOCH=1700000000"}
	others := append([]string{
		"GOENV=" + settings, "GOFLAGS=-race -tags=poison", "GOAMD64=v4", "GOARM=5", "GO386=softfloat", "GOEXPERIMENT=arenas", "GOOS=windows",
		"GOARCH=386", "GOWORK=/nonexistent", "CGO_CFLAGS=-O0", "CC=false", "GODEBUG=madvdontneed=1", "GO_EXTLINK_ENABLED=1", "GIT_DIR=/nonexistent",
		"GZIP=-1", "LC_ALL=C.UTF-8", "TZ=Asia/Tokyo",
	}, variables...)
	clean := output(t, inEnvironment(t, append(variables, "GOENV=off"), "sh", "-euc", script))
	if got := output(t, inEnvironment(t, others, "sh", "-euc", "umask 077\n"+script)); got != clean {
		t.Errorf("with variables of the user (+) and without (-):\n%s", cmp.Diff(clean, got))
	}
	if got := output(t, inEnvironment(t, others, "sh", "-euc", "cd ..; . tools/clean-environment; go env GOPRIVATE")); got != "private.example.com\n" {
		t.Errorf("GOPRIVATE of go env -w is %q", got)
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
		if err := os.CopyFS(filepath.Join(tree, name), os.DirFS("../tools")); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) {
		t.Helper()
		cmd := command(t, []string{"GIT_CONFIG_GLOBAL=/dev/null", "GIT_COMMITTER_DATE=1700000000 +0200"}, "git",
			append([]string{"-C", tree, "-c", "user.name=test", "-c", "user.email=test@example.com"}, args...)...)
		output(t, cmd)
	}
	git("init", "-q")
	git("add", "tools")
	git("commit", "-q", "-m", "all")
	if got := output(t, command(t, []string{"GIT_DIR=/nonexistent"}, filepath.Join(tree, "tools/commit-time"))); got != "1700000000\n" {
		t.Errorf("the time of the commit is %q", got)
	}
	if got := output(t, command(t, nil, filepath.Join(archive, "tools/commit-time"))); got != "" {
		t.Errorf("the time of an archive is %q", got)
	}
	build := []string{"GO=go", "TAGS=some", "VERSION=1.2.3", "ARCHES=amd64", "FORMATS=deb"}
	if text, err := inEnvironment(t, build, filepath.Join(archive, "tools/binaries")).CombinedOutput(); err == nil || !strings.Contains(string(text), "want the time of the sources") {
		t.Errorf("without a time: %v\n%s", err, text)
	}
	build = append(build, "SOURCE_DATE_EPOCH=1700000000")
	for dir, want := range map[string]string{archive: "prints no commit", tree: "prints +dirty"} {
		text, err := inEnvironment(t, build, filepath.Join(dir, "tools/binaries")).CombinedOutput()
		if err == nil || !strings.Contains(string(text), want) { // there is no Makefile
			t.Errorf("%s: %v, want %q in:\n%s", dir, err, want, text)
		}
	}
}

// TestManualOfAnotherMachine writes the manual while the environment asks for the binaries of another
// machine. `make run` and `make build` do not write it. P12.
func TestManualOfAnotherMachine(t *testing.T) {
	netns.Need(t, "make")
	cmd := command(t, nil, "make", "-C", "..", "manual")
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=s390x")
	output(t, cmd)
	for _, page := range []string{"nametap/man/man1/nametap.1", "nametap-discovery/man/man1/nametap-discovery.1"} {
		if text := read(t, filepath.Join("../bin/share", page)); !strings.HasPrefix(text, ".TH ") && !strings.Contains(text, "\n.TH ") {
			t.Errorf("%s is not a manual page", page)
		}
	}
	if text := output(t, command(t, nil, "make", "-C", "..", "-n", "run")); strings.Contains(text, "manual") || !strings.Contains(text, "go build") {
		t.Errorf("make run runs:\n%s", text)
	}
}
