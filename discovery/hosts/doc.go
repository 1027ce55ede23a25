// Package hosts turns objects into hosts and their addresses, and keeps them up to date: the cost
// of a changed object depends on the hosts that depend on it, not on the number of objects.
//
// The steps are objects, claims, hosts, entries. A claim is what one object says about one host. A
// [Host] has all claims to it and its automatic VIP. An [Entry] is its line in the name table of the
// clients that share a [View], encoded.
//
// The files, each of which uses the ones below it:
//
//	status.go    the status that ServiceEntries must have
//	hosts.go     Hosts: applies changed objects, and follows aliases
//	cluster.go   the objects of one cluster
//	change.go    changes of objects, and merging them
//	mesh.go      the settings of the mesh
//	set.go       hosts in shards, and changes of them over several steps
//	scene.go     what depends on the client and not on a host: its Sidecar, and its place
//	view.go      what a client sees: views, and a host's entry in one
//	place.go     which cluster's addresses a client gets
//	host.go      Host, and the entries that it has made
//	sidecars.go  which Sidecar a client has; labels.go compares labels
//	entry.go     the entry of a host, from the claims that a client sees
//	vip.go       automatic VIPs
//	claims.go    from objects to claims
//
// Nothing here locks. Hosts and entries do not change after they are made, but a host remembers the
// entries that it has made, so its users need a common lock.
package hosts
