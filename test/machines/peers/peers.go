// Package peers builds the programs that nametap is tested with, from the modules in its
// folders: "kubernetes", "node" and "istiod". Each links all of its programs, which its first
// argument selects.
//
// A build takes minutes, so the results are kept in the user's cache directory, below
// nametap/peers, until their sources or the version of Go change.
package peers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
	// The working directory of a test is the folder of its package, in the same module.
	output, err := exec.CommandContext(tb.Context(), "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	dir := filepath.Join(filepath.Dir(strings.TrimSpace(string(output))), "peers", name)
	flags, key, err := inputs(dir)
	if err != nil {
		return "", err
	}
	cache, err := Cache("peers")
	if err != nil {
		return "", err
	}
	path = filepath.Join(cache, name+"-"+key)
	unlock, err := lock(path + ".lock") // another test may build the same peer
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	begun := time.Now()
	tb.Logf("building %s from %s: this takes up to 20 minutes, and 2 if Go has built its packages before", path, dir)
	// The build goes on if the test times out: the next one finds what is ready.
	cmd := exec.CommandContext(context.WithoutCancel(tb.Context()), "go", "build", "-ldflags="+flags, "-o", path+".new", ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd, err, output)
	}
	tb.Logf("built %s in %v", name, time.Since(begun).Round(time.Second))
	return path, os.Rename(path+".new", path)
}

// Cache returns a folder for what tests make once, and creates it.
func Cache(folder string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "nametap", folder)
	return cache, os.MkdirAll(cache, 0o755)
}

var kubernetesVersion = regexp.MustCompile(`\bk8s\.io/kubernetes (v\S+)`)

// inputs returns the linker's flags for the module in dir, and a hash of what its binary is
// built from.
func inputs(dir string) (flags, key string, err error) {
	hash := sha256.New()
	for _, name := range []string{"go.mod", "go.sum", "main.go"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", "", err
		}
		if name == "go.mod" {
			flags = "-s -w"
			if version := kubernetesVersion.FindSubmatch(text); version != nil {
				// Without a version, clients and kubelet refuse the API server.
				flags += " -X k8s.io/component-base/version.gitVersion=" + string(version[1])
			}
		}
		fmt.Fprintf(hash, "%s %d\n%s", name, len(text), text)
	}
	fmt.Fprintln(hash, runtime.Version(), flags)
	return flags, hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

// lock waits for an exclusive lock on a file.
func lock(path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if err != unix.EINTR {
			file.Close()
			return nil, fmt.Errorf("flock %s: %w", path, err)
		}
	}
}
