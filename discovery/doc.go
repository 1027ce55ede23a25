// Package discovery is nametap's own control plane. It reads Kubernetes and Istio objects
// from a directory, the Kubernetes API or both, builds name tables from them, and serves the
// tables over ADS in both variants, incremental and state-of-the-world.
//
// How an object comes into the tables of clients:
//
//  1. A source (package source) follows objects: package files follows a directory, package kube the
//     Kubernetes API, and package clusters other clusters. Package decode decodes each kind of object
//     (package object).
//  2. [Server] waits until a source has changed, reads all sources, and serves the changes. It serves
//     no table before all sources are complete.
//  3. Package hosts turns changed objects into claims, claims into hosts with automatic VIPs, and
//     hosts into entries of tables. A claim is what one object says about one host, for example its
//     addresses.
//  4. Package push sends each client its table, and then the changes of its table. Package auth
//     decides which clients may connect, and package intake counts what has arrived of their requests.
//
// The files:
//
//	server.go    the Server: starts all parts, and serves what changes in the sources
//	ads.go       which clients are served over ADS, and where
//	listener.go  the bounds of connections
//	memory.go    the bound of memory
//	table.go     Table: one table, without a server
//	inputs.go    the sources
//	report.go    the state of the sources, for operators; it logs what is new
//	metrics.go   the metrics
//	config.go    the settings
//
// The table of a client depends on the client's namespace (exportTo), its address families, and
// whether it asks for automatic VIPs (DNS_AUTO_ALLOCATE).
package discovery
