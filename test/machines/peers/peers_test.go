package peers

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestBuild checks that Build makes a binary that runs, and finds it in the cache afterwards.
func TestBuild(t *testing.T) {
	t.Setenv("GOCACHE", goCache(t)) // its default is in the directory that changes
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	module := t.TempDir()
	peer := filepath.Join(module, "peers", "hello")
	if err := os.MkdirAll(peer, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(module, "go.mod"): "module example.com/tests\n",
		filepath.Join(peer, "go.mod"):   "module example.com/tests/peers/hello\n",
		filepath.Join(peer, "go.sum"):   "",
		filepath.Join(peer, "main.go"):  "package main\n\nfunc main() { println(\"hello\") }\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(module)
	first := Build(t, "hello")
	if output, err := exec.CommandContext(t.Context(), first).CombinedOutput(); err != nil || string(output) != "hello\n" {
		t.Errorf("%s: %q, %v", first, output, err)
	}
	built, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := os.Stat(Build(t, "hello")); err != nil || !os.SameFile(built, second) {
		t.Errorf("the second build is another file than the first: %v, %v", second, err)
	}
	if err := os.WriteFile(filepath.Join(peer, "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed := Build(t, "hello"); changed == first {
		t.Errorf("the same path %s after a change of main.go", changed)
	}
}

func goCache(t *testing.T) string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(output))
}
