// Package discovery is nametap's own control plane. It reads Kubernetes and Istio objects
// from a directory, the Kubernetes API or both, builds name tables from them, and serves the
// tables over ADS in both variants, incremental and state-of-the-world.
//
// To follow an object, read in this order:
//
//  1. A source (package source) follows objects, and package decode decodes each kind of them
//     (package object): package files follows a directory, package kube the Kubernetes API, and
//     package clusters other clusters.
//  2. inputs.go waits until a source has changed, reads all of them, and serves what has changed. It serves
//     nothing before each of them is complete. report.go logs what is new.
//  3. Package hosts turns changed objects into claims (this host has these addresses, according
//     to that namespace), claims into hosts with automatic VIPs, and hosts into entries of tables.
//     vips.go saves the VIPs in the state directory. writer.go writes them to the status of ServiceEntries.
//  4. Package push sends the tables to the clients, and to each only what has changed for it. limits.go
//     bounds what they can occupy, with package intake.
//
// server.go starts all of it. listen.go opens the listeners, certificate.go gets the certificate
// for TLS, and package auth decides which clients may connect. table.go makes one table and serves
// nothing.
//
// What a client sees depends on its node: its namespace (exportTo), its address families,
// and whether it asks for automatic VIPs (DNS_AUTO_ALLOCATE).
package discovery
