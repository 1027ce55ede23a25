// Package hosts turns objects of Kubernetes, for example Services, into hosts and their addresses, and keeps the hosts
// up to date. The cost of a change depends on the hosts that the changed object affects, not on the number of objects.
//
// The steps are objects, claims, hosts, entries. A claim is what one object says about one host. A [Host] has all
// claims to it and its automatic VIP, a virtual address for a host that has no address. An [Entry] is the encoded entry
// of a host in the name table of the clients that share a [View].
//
// A host has one owner for each client: the first step of making an entry is to find the claims that count
// ([Viewer.Entry]), and nothing else that clients get depends on other claims.
//
// The files; a file uses the files below it:
//
//	hosts.go     Hosts: applies changed objects and settings of the mesh, and finds the hosts that answer for aliases
//	names.go     names that belong to Services
//	cluster.go   the objects of one cluster
//	usage.go     what each namespace takes in the tables of other namespaces
//	set.go       hosts in shards, and in which shards a namespace may see hosts in another way than others
//	scene.go     what depends on the client and not on a host: its Sidecar, and its place
//	view.go      what a client sees: views, the claims that count in a view, and the entry of a host made of them
//	place.go     which cluster's addresses a client gets
//	host.go      Host, the entries that it has made, and automatic VIPs
//	sidecars.go  which Sidecar a client has
//	entry.go     the entry of a host, from the claims that a client sees
//	claims.go    from objects to claims
//
// The package has no locks: callers must lock [Hosts] and [Special]. Hosts and entries do not change after they are
// made, except that a host remembers its entries, which is safe for concurrent use.
package hosts
