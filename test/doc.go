// Package test has only tests. They run the real binary in network namespaces: hosts with
// nameservers, a control plane, clients and rules.
package test
