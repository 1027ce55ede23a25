// Package test has only tests. They run the real binary in network namespaces: hosts with
// nameservers, a control plane, clients and rules.
//
// A test makes a host or a vm, starts an agent on it and looks at it from outside:
//
//   - host_test.go: a host, its nameservers, its control plane and its files;
//   - vm_test.go: a vm, a host whose agent captures DNS and whose nameservers are on
//     another machine;
//   - agent_test.go: an agent, its log, its process and its status server;
//   - hosts_test.go: hosts that `nametap doctor` examines, broken ones and healthy ones;
//   - command_test.go: other commands of nametap, and their results;
//   - clients_test.go: DNS clients, such as dig;
//   - stalls_test.go: the moments in which this machine stood still, which no verdict counts;
//   - load_test.go: many clients at a time, none of whose queries may be lost;
//   - plane_test.go: nametap-discovery and its pods.
//
// The namespaces, nameservers and control planes themselves are in internal/testkit.
package test
