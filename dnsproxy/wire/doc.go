// Package wire reads and writes the parts of DNS messages that the rest of
// dnsproxy needs in wire form (RFC 1035, section 4): domain names, the header, the
// question, the OPT record. What it does for each query allocates nothing.
//
//	names.go    domain names in lower case, the keys of tables and caches; special-use names (RFC 6761)
//	message.go  the header, a client's query, the OPT record and its options
//	walk.go     questions, records and compressed names of any message
package wire
