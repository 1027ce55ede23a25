// Package peers builds the programs that nametap is tested with, from the modules in its
// folders: "kubernetes", "node" and "istiod", each of which links all of its programs, which its
// first argument selects, and "helm3" and "helm4", which have the command helm as their tool.
//
// A build takes minutes, so package cache keeps the results until their sources or the version
// of Go change.
package peers

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

	"github.com/nametap/nametap/test/machines/cache"
)

// Build returns the path of a peer's binary, and builds it first if the cache has none.
func Build(tb testing.TB, name string) string {
	tb.Helper()
	path, err := build(tb, name)
	if err != nil {
		tb.Fatalf("building %s: %v", name, err)
	}
	return path
}

func build(tb testing.TB, name string) (path string, err error) {
	tb.Helper()
	module, err := folder(tb, name)
	if err != nil {
		return "", err
	}
	recipe, flags, err := inputs(module)
	if err != nil {
		return "", err
	}
	dir, err := cache.Dir("peer-"+name, recipe, func(dir string) error {
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
	return filepath.Join(dir, name), err
}

var kubernetesVersion = regexp.MustCompile(`\bk8s\.io/kubernetes (v\S+)`)

// inputs returns what the binary of a module is built from, and the flags of the linker.
func inputs(module string) (recipe []string, flags string, err error) {
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

// File returns a file of a module that a peer requires, such as a manifest.
func File(tb testing.TB, peer, module, path string) string {
	tb.Helper()
	text, err := os.ReadFile(Path(tb, peer, module, path))
	if err != nil {
		tb.Fatal(err)
	}
	return string(text)
}

// Path returns the path of a file or a directory of a module that a peer requires.
func Path(tb testing.TB, peer, module, path string) string {
	tb.Helper()
	dir, err := folder(tb, peer)
	if err != nil {
		tb.Fatal(err)
	}
	inPeer := func(arguments ...string) string {
		cmd := exec.CommandContext(tb.Context(), "go", arguments...)
		cmd.Dir = dir
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

// folder returns the folder of a peer's module.
func folder(tb testing.TB, peer string) (string, error) {
	tb.Helper()
	// The working directory of a test is the folder of its package, in the same module.
	output, err := exec.CommandContext(tb.Context(), "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Join(filepath.Dir(strings.TrimSpace(string(output))), "peers", peer), nil
}
