package vm_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/test/machines/vm"
)

// TestInstall installs nametap as README.md says, and looks up names with it.
func TestInstall(t *testing.T) {
	m := vm.Boot(t)
	if got := m.Lookup(vm.Mesh); got != vm.NamedIP {
		t.Errorf("without nametap, %s has %s, want %s", vm.Mesh, got, vm.NamedIP)
	}
	m.Install()
	m.Start()
	for name, want := range map[string]string{
		vm.Mesh: vm.MeshIP, "web": vm.MeshIP, "web.corp.example": vm.MeshIP, "www.example.org": vm.NamedIP,
	} {
		if got := m.Lookup(name); got != want {
			t.Errorf("%s has %s, want %s", name, got, want)
		}
	}
	if got := m.Run("getent", "ahostsv4", "web"); !strings.Contains(got, vm.MeshIP) {
		t.Errorf("getent prints %q, want %s", got, vm.MeshIP)
	}
	if got := m.Run("nametap", "status"); !strings.Contains(got, "ready          yes") {
		t.Errorf("nametap status prints:\n%s", got)
	}
	if journal := m.Journal("nametap.service"); !strings.Contains(journal, "Started nametap.service") || strings.Contains(journal, "level=ERROR") {
		t.Errorf("the journal:\n%s", journal)
	}
	if got := strings.TrimSpace(m.Run("systemctl", "is-enabled", "nametap.socket", "nametap.service")); got != "enabled\nenabled" {
		t.Errorf("the units are %q", got)
	}
}
