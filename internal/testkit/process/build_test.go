package process_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
)

// inChild is set for the process that TestSourcesAreSeen starts.
const inChild = "PROCESS_TEST_BUILDS"

// TestMain calls Build too early in the child that is to show this.
func TestMain(m *testing.M) {
	if os.Getenv(inChild) == "early" {
		_, err := process.Build("nametap")
		_, _ = os.Stdout.WriteString(err.Error())
		return
	}
	os.Exit(m.Run())
}

// TestSourcesAreSeen checks that Go's test cache sees which directories a command is built from, and that a
// build before the first test, which it would not see, is refused.
func TestSourcesAreSeen(t *testing.T) {
	if os.Getenv(inChild) == "test" {
		dir, err := process.Build("nametap-demo")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		return
	}
	seen := filepath.Join(t.TempDir(), "seen")
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSourcesAreSeen$", "-test.testlogfile="+seen)
	child.Env = append(os.Environ(), inChild+"=test")
	if output, err := child.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	text, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{"cmd/nametap-demo", "agent", "dnsproxy/upstream", "go.mod", "go.sum"} {
		if !strings.Contains(string(text), "/"+source+"\n") {
			t.Errorf("%s is not opened where the cache sees it:\n%s", source, text)
		}
	}
	child = exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), inChild+"=early")
	if output, err := child.CombinedOutput(); err != nil || !strings.Contains(string(output), "must be built by a test") {
		t.Errorf("a build before the tests: %v, %s", err, output)
	}
}
