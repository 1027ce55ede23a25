// Package vm has only tests. They boot a Debian with systemd in a container that has its own network, install nametap in
// it as README.md says, and test it there: see lab.Machine. `make vm` runs them. Tests that leave the machine as it was
// share one, as subtests.
package vm
