// Package deploy has the files to run nametap on VMs and in Kubernetes. Its tests check
// them with the real binaries, Kubernetes' API types and systemd's tools.
package deploy

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nametap/nametap/internal/testkit/process"
)

// binaries has both commands.
var binaries = process.Of("nametap", "nametap-discovery")

// agentID is the user and the group whose queries pass through the rules.
const agentID = 1337

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	defer binaries.Remove()
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// commandLimit is the time limit of a command: `make install` builds the binaries, on a
// machine that may be busy.
const commandLimit = 5 * time.Minute

// command returns a command with PATH and environ as its environment.
func command(t *testing.T, environ []string, name string, args ...string) *exec.Cmd {
	t.Helper()
	seen(t)
	ctx, cancel := context.WithTimeout(t.Context(), commandLimit)
	t.Cleanup(cancel)
	if !strings.Contains(name, "/") && strings.HasPrefix(name, "nametap") {
		name = filepath.Join(binaries.Dir(t), name)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, environ...)
	return cmd
}

// seen opens all directories of the repository, so that Go's test cache sees a change of what commands read.
func seen(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil || !entry.IsDir():
			return err
		case path == "../.git" || path == "../bin":
			return filepath.SkipDir
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// output runs a command, which must succeed, and returns its output and errors.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, text)
	}
	return string(text)
}

// read reads a file.
func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
