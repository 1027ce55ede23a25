package vm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// TestStop stops nametap under load. Stopping takes less than 1 s and leaves no rule, socket or
// process. V4.
func TestStop(t *testing.T) {
	m := vm.Boot(t)
	before := m.Net.Rules()
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	began := time.Now()
	m.Run("systemctl", append([]string{"stop"}, vm.Units()...)...)
	took := time.Since(began)
	tr.more(time.Second / 10) // of names that are not of the mesh
	t.Logf("stopping took %v", took.Round(time.Millisecond))
	if took > time.Second {
		t.Errorf("stopping took %v, want less than 1 s", took)
	}
	if mesh, forwarded := tr.stop(load.Right, load.Foreign); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no answer", mesh, forwarded)
	}
	if after := m.Net.Rules(); after != before {
		t.Errorf("rules and sets after stop:\n%s\nand before nametap was installed:\n%s", after, before)
	}
	if sockets := m.Run("ss", "--no-header", "--listening", "--tcp", "--udp", "--numeric"); strings.Contains(sockets, ":15053") {
		t.Errorf("sockets are left:\n%s", sockets)
	}
	if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" {
		t.Errorf("processes are left:\n%s", processes)
	}
	if state := m.Run("systemctl", "list-units", "--plain", "--no-legend", "--state=failed"); state != "" {
		t.Errorf("failed units:\n%s", state)
	}
}

// TestSocketStops stops the sockets alone, under load. The rules go with them. V4.
func TestSocketStops(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	tr.forwardedGap()
	began := time.Now()
	m.Run("systemctl", "stop", "nametap.socket")
	t.Logf("stopping took %v", time.Since(began).Round(time.Millisecond))
	tr.more(time.Second / 10)
	tr.wantOutage()
	tr.stop()
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
	if got := m.Lookup("www.example.org"); got != vm.NamedIP {
		t.Errorf("www.example.org has %s, want %s", got, vm.NamedIP)
	}
}
