// Package discovery is nametap's own control plane. It reads Kubernetes and Istio objects
// from a directory, the Kubernetes API or both, builds name tables from them, and serves the
// tables over ADS in both variants, incremental and state-of-the-world.
//
// To follow an object, read in this order:
//
//  1. walk.go reads the files of the directory. watch.go tells when they may have
//     changed.
//  2. parse.go splits a file into documents and documents into objects; package decode decodes
//     each kind of object (package object), with yaml.go, which knows the line of every field.
//     A broken document affects only its own objects.
//  3. source.go decides which objects are in use. An object that becomes broken stays in
//     use in its last good form. Nothing is served before there is an object, and a
//     directory that becomes empty keeps all of them (see Config.AllowEmpty).
//     Package kube has the objects of the Kubernetes API, and package clusters
//     for those of other clusters (otherclusters.go). inputs.go combines all sources, and
//     serves nothing before each of them is complete.
//  4. Package hosts turns changed objects into claims (this host has these addresses, according
//     to that namespace), claims into hosts with automatic VIPs, and hosts into entries of tables.
//     state.go saves the VIPs, and the last good objects, in the state directory. writer.go writes
//     the VIPs to the status of ServiceEntries.
//  5. Package push sends the tables to the clients, and to each only what has changed for it. limits.go
//     bounds what connections can occupy.
//
// server.go starts all of it, and rebuild.go repeats steps 1 to 5 after each change. listen.go opens the
// listeners, certificate.go gets the certificate for TLS, and package auth decides who may connect.
//
// What a client sees depends on its node: its namespace (exportTo), its address families,
// and whether it asks for automatic VIPs (DNS_AUTO_ALLOCATE).
package discovery
