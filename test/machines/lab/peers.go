package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
)

// Repository returns the directory of nametap's sources.
func Repository() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// programs are nametap's own.
var programs = process.Of("nametap", "nametap-discovery")

// Program returns the path of "nametap" or "nametap-discovery".
func Program(tb testing.TB, name string) string {
	tb.Helper()
	return filepath.Join(programs.Dir(tb), name)
}

// LoadProgram builds the command nametap-load, a static binary, and returns its path.
func LoadProgram(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "nametap-load")
	build := exec.CommandContext(tb.Context(), "go", "build", "-trimpath", "-o", path, "github.com/nametap/nametap/test/machines/lab/load/nametap-load")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		tb.Fatalf("%v: %v\n%s", build, err, output)
	}
	return path
}

// Peer returns the path of the binary of a peer, which is built from a module in ../peers: "kubernetes", "node" and
// "istiod", each of which links all of its programs, which its first argument selects, and "helm3" and "helm4", which
// have the command helm as their tool. A build takes minutes, and is kept until its sources or the version of Go change.
func Peer(tb testing.TB, name string) string {
	tb.Helper()
	module := peerModule(name)
	recipe, flags, err := peerRecipe(module)
	if err != nil {
		tb.Fatal(err)
	}
	dir, err := Cached("peer-"+name, recipe, func(dir string) error {
		begun := time.Now()
		tb.Logf("building %s from %s: this takes up to 20 minutes, and 2 if Go has built its packages before", name, module)
		what := "."
		if _, err := os.Stat(filepath.Join(module, "main.go")); errors.Is(err, fs.ErrNotExist) {
			what = "tool" // the one of the module
		}
		cmd := exec.CommandContext(tb.Context(), "go", "build", "-ldflags="+flags, "-o", filepath.Join(dir, name), what)
		cmd.Dir = module
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", cmd, err, output)
		}
		tb.Logf("built %s in %v", name, time.Since(begun).Round(time.Second))
		return nil
	})
	if err != nil {
		tb.Fatalf("building %s: %v", name, err)
	}
	return filepath.Join(dir, name)
}

func peerModule(name string) string {
	return filepath.Join(Repository(), "test/machines/peers", name)
}

var kubernetesVersion = regexp.MustCompile(`\bk8s\.io/kubernetes (v\S+)`)

// peerRecipe returns what the binary of a module is built from, and the flags of the linker.
func peerRecipe(module string) (recipe []string, flags string, err error) {
	flags = "-s -w"
	for _, name := range []string{"go.mod", "go.sum", "main.go"} {
		text, err := os.ReadFile(filepath.Join(module, name))
		if err != nil && (name != "main.go" || !errors.Is(err, fs.ErrNotExist)) {
			return nil, "", err
		}
		if version := kubernetesVersion.FindSubmatch(text); name == "go.mod" && version != nil {
			// Without a version, clients and kubelet refuse the API server.
			flags = "-s -w -X k8s.io/component-base/version.gitVersion=" + string(version[1])
		}
		recipe = append(recipe, string(text))
	}
	return append(recipe, runtime.Version(), flags), flags, nil
}

// PeerPath returns the path of a file or a directory of a module that a peer requires.
func PeerPath(tb testing.TB, peer, module, path string) string {
	tb.Helper()
	inPeer := func(arguments ...string) string {
		cmd := exec.CommandContext(tb.Context(), "go", arguments...)
		cmd.Dir = peerModule(peer)
		cmd.Env = append(os.Environ(), "GOWORK=off")
		output, err := cmd.Output()
		if err != nil {
			tb.Fatalf("%v: %v", cmd, err)
		}
		return strings.TrimSpace(string(output))
	}
	inPeer("mod", "download", module) // the peer may have been built elsewhere
	return filepath.Join(inPeer("list", "-m", "-f", "{{.Dir}}", module), path)
}
