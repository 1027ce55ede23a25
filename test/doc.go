// Package test runs the real binary in network namespaces: hosts with nameservers,
// a control plane, clients and rules of their own. It is tests only.
package test
