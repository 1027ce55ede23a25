package lab

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// Units are the units of nametap, as `systemctl stop` takes them.
func Units() []string { return []string{"nametap.socket", "nametap.service"} }

// Install installs nametap by `make install`, and configures it. Nothing is started.
func (m *Machine) Install(settings ...string) {
	m.tb.Helper()
	m.InstallFrom(Repository())
	m.Configure(settings...)
}

// Configure writes the settings of the agent: those that it needs for the World, and then settings, one NAME=value each.
func (m *Machine) Configure(settings ...string) {
	m.tb.Helper()
	settings = append([]string{"NAMETAP_XDS_ADDR=" + Control, "NAMETAP_XDS_PLAINTEXT=true", "POD_NAMESPACE=shop"}, settings...)
	m.Write("/etc/default/nametap", strings.Join(settings, "\n")+"\n")
}

// InstallFrom runs `make install` in a directory, over what is installed.
func (m *Machine) InstallFrom(dir string) {
	m.tb.Helper()
	install := exec.CommandContext(m.tb.Context(), "make", "--silent", "--directory="+dir, "install",
		fmt.Sprintf("DESTDIR=/proc/%d/root", m.leader))
	output, err := install.CombinedOutput()
	if err != nil {
		m.tb.Fatalf("%s: %v\n%s", install, err, output)
	}
	_, m.setup, _ = strings.Cut(string(output), "then run: ")
}

// Start runs the commands that `make install` prints, and returns when the machine has names of
// the mesh.
func (m *Machine) Start() {
	m.tb.Helper()
	if m.setup == "" {
		m.tb.Fatal("`make install` did not print what to run")
	}
	m.Run("sh", "-euxc", m.setup)
	m.AwaitMesh()
}

// Started boots a machine whose agent runs.
func Started(tb testing.TB, options ...Option) *Machine {
	tb.Helper()
	m := Boot(tb, options...)
	m.Install()
	m.Start()
	return m
}

// AwaitMesh returns when a program of the machine can look up [Mesh].
func (m *Machine) AwaitMesh() {
	m.tb.Helper()
	wait.Until(m.tb, "the machine can look up "+Mesh, func() bool { return m.Lookup(Mesh) == MeshIP })
}

// Captured reports whether the machine has rules of nametap.
func (m *Machine) Captured() bool {
	m.tb.Helper()
	return strings.Contains(m.Net.Rules(), "-j NAMETAP_OUTPUT")
}

// Lookup sends one query from the machine to the nameserver in its resolv.conf, and returns the addresses in the
// response, or the error.
func (m *Machine) Lookup(name string) string {
	m.tb.Helper()
	return m.Net.Ask(Named+":53", name, "A")
}
