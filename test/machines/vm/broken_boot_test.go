package vm_test

import (
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/vm"
)

// TestBootWithoutProgram boots a machine without nametap's program. The host has DNS, restarts
// back off, and the agent starts by itself when the program is back. V2.
func TestBootWithoutProgram(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Run("mv", binary, binary+".good")
	m.Reboot()
	if got := m.Lookup(vm.Mesh); got != vm.NamedIP {
		t.Errorf("%s has %s, want %s from the nameserver", vm.Mesh, got, vm.NamedIP)
	}
	const pause = 10 * time.Second
	wait.Until(t, "10 s pass between two starts", func() bool {
		starts := timesOf(t, m.Journal("nametap.service"), "systemd[1]: Starting nametap.service")
		n := len(starts)
		return n > 1 && starts[n-1].Sub(starts[n-2]) >= pause
	})
	restore(m)
	m.AwaitMesh()
}
