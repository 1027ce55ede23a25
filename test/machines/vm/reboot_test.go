package vm_test

import (
	"testing"

	"github.com/nametap/nametap/test/machines/vm"
)

// TestReboot boots a machine again. nametap starts by itself.
func TestReboot(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Reboot()
	m.AwaitMesh()
}
