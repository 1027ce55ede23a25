// Package deploy checks the files of the directory deploy with the binaries, systemd's tools, promtool and a kernel.
package deploy

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/process"
)

// binaries has both commands.
var binaries = process.Of("nametap", "nametap-discovery")

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	defer binaries.Remove()
	return m.Run()
}

// command returns a command with PATH, HOME (of Go) and environ as its environment. It runs in the root of the
// repository.
func command(t *testing.T, environ []string, name string, args ...string) *exec.Cmd {
	t.Helper()
	if strings.HasPrefix(name, "nametap") {
		name = filepath.Join(binaries.Dir(t), name)
	}
	for _, read := range []string{"../../deploy", "../../tools"} { // so that Go's test cache sees a change of what commands read
		_ = filepath.WalkDir(read, func(string, fs.DirEntry, error) error { return nil })
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...)
	cmd.Dir = "../.."
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}, environ...)
	return cmd
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

// read reads a file. Relative paths are below deploy.
func read(t *testing.T, path string) string {
	t.Helper()
	if !filepath.IsAbs(path) {
		path = filepath.Join("../../deploy", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// write writes a file and its directory.
func write(t *testing.T, path, text string) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(text), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// load decodes the object of a kind in a manifest.
func load[T any](t *testing.T, variant, kind string) (object T) {
	t.Helper()
	for document := range strings.SplitSeq(read(t, "kubernetes/"+variant+".yaml"), "\n---\n") {
		if strings.Contains("\n"+document, "\nkind: "+kind+"\n") {
			if err := yaml.Unmarshal([]byte(document), &object); err != nil {
				t.Fatal(err)
			}
		}
	}
	return object
}
