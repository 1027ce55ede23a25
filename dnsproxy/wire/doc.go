// Package wire reads and writes the parts of DNS messages that the rest of
// dnsproxy needs in wire form (RFC 1035, section 4): domain names, the header, the
// question, the OPT record. It allocates nothing on the way of a query.
//
//	names.go    domain names, folded to lower case: what tables and caches are keyed by
//	special.go  special-use names (RFC 6761)
//	header.go   offsets and bits of the header
//	opt.go      the OPT record and its options
//	query.go    a client's query
//	walk.go     questions, records and compressed names of any message
package wire
