// Package wire reads and writes the parts of DNS messages that the rest of
// dnsproxy needs in wire form (RFC 1035, section 4): domain names, the header, the
// question, the OPT record. It allocates nothing on the way of a query.
//
//	names.go    domain names, folded to lower case, which tables and caches are keyed by;
//	            special-use names (RFC 6761)
//	message.go  the header, a client's query, the OPT record and its options
//	walk.go     questions, records and compressed names of any message
package wire
