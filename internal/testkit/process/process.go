// Package process builds nametap's commands for tests and inspects their processes.
package process

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// Binaries are static binaries of commands, such as "nametap", as `make build` builds them.
type Binaries struct {
	commands []string
	build    sync.Once
	dir      string
	err      error
}

// WriteScript writes a script that can be run, in place of one that may run already. A child writes it: a file that this
// process has open for writing may be open in a child that another goroutine starts meanwhile, and could not be run then.
func WriteScript(tb testing.TB, path, text string) {
	tb.Helper()
	writer := exec.CommandContext(tb.Context(), "sh", "-c", `cat >"$0.new" && chmod 755 "$0.new" && mv "$0.new" "$0"`, path)
	writer.Stdin = strings.NewReader(text)
	if output, err := writer.CombinedOutput(); err != nil {
		tb.Fatalf("%v\n%s", err, output)
	}
}

// Of returns the binaries of commands. They are built when Dir is called.
func Of(commands ...string) *Binaries { return &Binaries{commands: commands} }

// Dir returns the directory of the binaries, which the first call builds.
func (b *Binaries) Dir(tb testing.TB) string {
	tb.Helper()
	b.build.Do(func() { b.dir, b.err = Build(b.commands...) })
	if b.err != nil {
		tb.Fatal(b.err)
	}
	return b.dir
}

// Remove removes the binaries, after all tests.
func (b *Binaries) Remove() { _ = os.RemoveAll(b.dir) }

// errEarly is the error of a call from TestMain.
var errEarly = errors.New("binaries must be built by a test: what is opened before the first test is not seen by Go's test cache")

// Build builds binaries in a new directory that every user may read. The caller removes the directory.
//
// Go's test cache runs a test again if a file or directory that the test opened in its own module has changed. Build
// opens the sources of the commands, so a test in the module of the commands runs again if these sources have
// changed. In tests of other modules, the cache does not notice such changes, so these tests must not be cached.
func Build(commands ...string) (dir string, err error) {
	if signal.Ignored(syscall.SIGHUP) { // for example under nohup: the programs that tests start would ignore it, too
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	dir, err = os.MkdirTemp("", "nametap-test-")
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir)
		}
	}()
	if err := os.Chmod(dir, 0o755); err != nil { // the agent runs as another user
		return "", err
	}
	// The build runs in the module of the commands, because other modules may lack dependencies of the commands.
	output, err := exec.CommandContext(context.Background(), "go", "list", "-m", "-f", "{{.Main}} {{.Dir}}", "github.com/nametap/nametap").Output()
	if err != nil {
		return "", fmt.Errorf("finding the module of the commands: %w", err)
	}
	own, root, _ := strings.Cut(strings.TrimSpace(string(output)), " ")
	if own == "true" && !flag.Parsed() { // TestMain has not called m.Run
		return "", errEarly
	}
	const tags = "-tags=grpcnotrace,nethttpomithttp2"
	packages := make([]string, len(commands))
	for i, command := range commands {
		packages[i] = "./cmd/" + command
	}
	build := exec.CommandContext(context.Background(), "go", append([]string{"build", "-trimpath", tags, "-ldflags=-s -w", "-o", dir + "/"}, packages...)...)
	build.Dir = root
	if err := openSources(build.Dir, append([]string{tags}, packages...)); err != nil {
		return "", err
	}
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", build, err, output)
	}
	return dir, nil
}

// openSources opens the directories of packages, and of all packages in the module at root that they import. It also
// opens go.mod and go.sum, which have the versions of other modules.
func openSources(root string, packages []string) error {
	list := exec.CommandContext(context.Background(), "go", append([]string{"list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Dir}}{{end}}{{end}}"}, packages...)...)
	list.Dir = root
	directories, err := list.Output()
	if err != nil {
		return fmt.Errorf("%v: %w", list, err)
	}
	sources := append(strings.Split(strings.TrimSpace(string(directories)), "\n"), filepath.Join(root, "go.mod"), filepath.Join(root, "go.sum"))
	for _, source := range sources {
		file, err := os.Open(source)
		if err != nil {
			return fmt.Errorf("opening the sources of %q: %w", packages, err)
		}
		_ = file.Close() // nothing was written
	}
	return nil
}

// Children returns the child processes of pid that pid has not waited for yet. A process
// that has ended has no children.
func Children(pid int) []int {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		panic(err) // the pattern is malformed
	}
	var children []int
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for field := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				panic(err) // not the format of proc(5)
			}
			children = append(children, child)
		}
	}
	return children
}
