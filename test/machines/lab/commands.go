package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// Run runs a command of the machine and returns its standard output. The test fails if the
// command fails.
func (m *Machine) Run(name string, args ...string) string {
	m.tb.Helper()
	return m.Pipe("", name, args...)
}

// Pipe is like Run with input as the command's standard input.
func (m *Machine) Pipe(input, name string, args ...string) string {
	m.tb.Helper()
	stdout, stderr, err := m.nsenter(m.inside(name, args), input)
	if err != nil {
		m.tb.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// Try is like Run for a command that may fail. It returns both outputs, the standard one first.
func (m *Machine) Try(name string, args ...string) (output string, err error) {
	m.tb.Helper()
	stdout, stderr, err := m.nsenter(m.inside(name, args), "")
	return stdout + stderr, err
}

// Outside runs a command of the host that sees the machine's disk as /mnt/root, also before
// the machine boots. It returns its standard output. The test fails if the command fails.
func (m *Machine) Outside(name string, args ...string) string {
	m.tb.Helper()
	args = append([]string{fmt.Sprintf("--mount=/proc/%d/ns/mnt", m.disk), "--", name}, args...)
	stdout, stderr, err := m.nsenter(args, "")
	if err != nil {
		m.tb.Fatalf("%s: %v\n%s%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// inside returns the arguments of nsenter for a command of the machine.
func (m *Machine) inside(name string, args []string) []string {
	return append([]string{"--target=" + strconv.Itoa(m.leader), "--all", "--", "/usr/bin/env", "-i",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "SYSTEMD_PAGER=", name}, args...)
}

// nsenter runs nsenter, for up to [wait.Limit].
func (m *Machine) nsenter(args []string, input string) (stdout, stderr string, err error) {
	// Cleanup functions run after the end of the test's context.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.tb.Context()), wait.Limit)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// Write writes a file of the machine. It makes the directory if that is missing.
func (m *Machine) Write(path, text string) {
	m.tb.Helper()
	m.Pipe(text, "sh", "-euc", `mkdir -p "$(dirname "$1")" && cat >"$1"`, "sh", path)
}

// Read returns the content of a file of the machine.
func (m *Machine) Read(path string) string {
	m.tb.Helper()
	return m.Run("cat", path)
}

// Property returns a property of a unit, such as "ActiveState".
func (m *Machine) Property(name, unit string) string {
	m.tb.Helper()
	return strings.TrimSpace(m.Run("systemctl", "show", "--property="+name, "--value", unit))
}

// Systemctl runs a command of systemctl for the units of nametap.
func (m *Machine) Systemctl(command string) {
	m.tb.Helper()
	m.Run("systemctl", append([]string{command}, Units()...)...)
}

// Journal returns what a unit, such as "nametap.service", has logged since the machine booted,
// and what systemd has logged of it. The times have microseconds.
func (m *Machine) Journal(unit string) string {
	m.tb.Helper()
	m.Run("journalctl", "--sync")
	return m.Run("journalctl", "--boot", "--no-pager", "--output=short-precise", "--unit="+unit)
}

// keepJournal writes the journal of a machine whose test has failed to a file.
func (m *Machine) keepJournal() {
	m.tb.Helper()
	if !m.tb.Failed() {
		return
	}
	journal, err := m.Try("journalctl", "--no-pager", "--output=short-precise")
	if err == nil {
		path := filepath.Join(os.TempDir(), "nt-lab-"+strings.ReplaceAll(m.tb.Name(), "/", "-")+".journal")
		err = os.WriteFile(path, []byte(journal), 0o644)
		m.tb.Logf("the journal of the machine is in %s", path)
	}
	if err != nil {
		m.tb.Logf("the journal of the machine is lost: %v", err)
	}
}
