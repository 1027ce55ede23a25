// Package guard decides which names outside of the mesh a workload may ask for, and reach.
//
// A [Policy] (policy.go) is read from a file, and judges names. A [Guard] (guard.go) has the policy in use, and gives each
// name that the policy allows a VIP of its own; records.go has what was asked for and reached. So there is no list of
// addresses beside the list of names: a client connects to the VIP of a name, and package egress carries the connection to
// the name. What is left for the kernel: the workload reaches its agent, VIPs and the networks that the policy lists.
//
// A VIP is a keyed hash of its name, as those of the control plane are, so it stays the same over changes of the policy and
// restarts, and needs no file.
package guard
