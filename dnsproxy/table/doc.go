// Package table holds the mesh's names. A [Table] is immutable: the next one is built from the
// shards of a push by [Table.With] and shares with its predecessor every shard that the push did
// not change. So a push that changes one host of 100,000 rebuilds some 400 hosts.
//
// A host is stored once, under its FQDN. Short names, names with a search domain, names of
// endpoints and ports, and PTR names are derived at query time: they cost lookups, but no
// memory.
//
// The files; a file uses the files below it:
//
//	build.go      the next table from the shards of a push
//	nametable.go  the table as a NameTable; the only file that imports api
//	services.go   the SRV records for a name
//	table.go      Table and its lookups: FQDN, wildcard, short name, part of a host, search domain, ancestor, address
//	match.go      the result of a lookup
//	suffixes.go   which suffixes the settings give to nameservers or keep from them
//	ancestors.go  names that exist because hosts are below them
//	claims.go     names that hosts claim besides their FQDNs
//	reverse.go    from an address to its hosts, for PTR queries
//	shard.go      the hosts, in shards by the hash of their names
//	candidate.go  a valid entry of a push, and the record that is made of it
//	endpoint.go   the labels of endpoints of headless Services: their addresses
//	host.go       a host: a view of its record
//	ports.go      ports of Services, and names of ports
//	destinations.go where connections to external hosts go, by port
//	cluster.go    the domain names by which short names are derived
//	entry.go      entries of a push in wire form
//	addresses.go  packed addresses of a host or a port
//	field.go      the fields of a record
package table
