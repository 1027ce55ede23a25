// Package table holds the mesh's names. A [Table] is immutable. [Table.With] builds the next table from the previous
// one and a push. The hosts are in shards, by the hash of their names, and the two tables share every shard that the
// push does not change. So a push that changes one host of 100,000 rebuilds some 400 hosts.
//
// A host is stored once, under its FQDN. Short names, names with a search domain, names of
// endpoints and ports, and PTR names are not stored. They are derived from the name in a query, with several lookups.
//
// These are the files; each file uses only the files below it:
//
//	build.go      the next table from the shards of a push
//	nametable.go  the table as a NameTable; the only file that imports api
//	services.go   the SRV records for a name
//	table.go      Table and its lookups: FQDN, wildcard, short name, part of a host, search domain, ancestor, address
//	match.go      the result of a lookup
//	suffixes.go   suffixes of the settings: which names are always or never forwarded
//	ancestors.go  names that exist because hosts are below them
//	reverse.go    from an address to its hosts, for PTR queries
//	shard.go      the hosts, in shards by the hash of their names
//	candidate.go  a valid entry of a push, and the record that is made of it
//	endpoint.go   labels with the addresses of endpoints of headless Services
//	host.go       a host: a view of its record, and the fields of records
//	ports.go      ports of Services, names of ports, and where connections to ports of external hosts go
//	cluster.go    the domain names that short names are derived with
//	entry.go      entries of a push in wire form
//	addresses.go  packed addresses of a host or a port
package table
