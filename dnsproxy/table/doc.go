// Package table holds the mesh's names. A [Table] is immutable: the next one is built from the
// shards of a push by [Table.With] and shares with its predecessor every shard that the push did
// not change, so a push that changes one host of 100,000 builds some 400 again.
//
// A host is stored once, under its FQDN. Short names, search-list expansions, names of
// endpoints and ports, and PTR names are derived at query time, so they cost lookups and no
// memory.
//
//	table.go      Table and Lookup: FQDN, wildcard, short name, search domain, ancestor
//	endpoint.go   endpoints of headless Services, by their addresses
//	ports.go      ports of Services, and names of ports
//	destinations.go where connections to external hosts lead, by port
//	services.go   what the SRV records for a name say
//	reverse.go    from an address to its hosts, for PTR queries
//	host.go       the record of one host; shards of hosts, by the hash of their names
//	domains.go    the domains that systemd-resolved is to send to the agent
//	cluster.go    the domain names that short names are derived with
//	suffixes.go   which suffixes the settings give to nameservers or keep from them
//	claims.go     names that hosts claim besides their FQDNs, and collisions
//	ancestors.go  names that exist because hosts are below them
//	build.go      the next table from the shards of a push
//	nametable.go  NameTables in wire form; the only file that imports api
package table
