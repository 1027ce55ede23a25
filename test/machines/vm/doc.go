// Package vm boots a Debian with systemd in a container that has its own network, installs
// nametap in it as README.md says, and tests it there. `make vm` runs the tests.
//
//	m := vm.Boot(t, vm.Packages("systemd-resolved"))
//	m.Install()
//	m.Start()
//	m.Run("systemctl", "restart", "nametap")
//	if got := m.Lookup(vm.Mesh); got != vm.MeshIP { … }
//
// Beside the machine is a network with a control plane and two nameservers, see [World].
//
// The root directory is made by debootstrap once and kept in the cache. A machine has an
// overlay of it in memory. A machine ends with its test, even if the test is interrupted.
package vm
