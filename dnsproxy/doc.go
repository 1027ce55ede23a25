// Package dnsproxy answers DNS queries from a table of mesh hosts and forwards
// the rest.
//
// # The order in which a query is answered
//
// decide.go is the one place that decides; the first rule that applies wins.
//
//  1. Not a query, or too short for a header: dropped and counted.
//  2. An opcode other than QUERY: forwarded as it came.
//  3. Not exactly one question: FORMERR. An EDNS version other than 0: BADVERS.
//  4. Class CH: version.bind and id.server. Any other class but IN: REFUSED.
//  5. A special-use name (special.go has the list): answered here. A setting that names
//     a suffix within such a zone (--upstream onion=…, --bypass) takes it out.
//  6. A name that is to bypass the table: forwarded. A host below such a suffix has no
//     name by which the rules after this one find it: no short name, no autopath, no PTR.
//  7. No table yet: as [BeforeSync] says.
//  8. PTR for an address of the table: the FQDNs of its hosts, sorted.
//  9. An own name, found in this order, which never depends on the order in
//     which a table arrives:
//     a. a host's FQDN; if two hosts claim one name, the one of the registry
//     Kubernetes, else the one whose key sorts first;
//     b. a wildcard, the longest suffix first;
//     c. a short name: name.namespace, name.namespace.svc, name in the own
//     namespace, alternative names;
//     d. autopath: one of a to c, followed by a domain of the search list, the
//     first such domain in the order of the list. The CNAME leads to the host's FQDN
//     if c found it, otherwise to the name without the search domain.
//  10. A name below a suffix that is local only, also with a domain of the search list
//     behind it: NODATA if the suffix is all of it or names of the table are below it
//     (RFC 8020), otherwise NXDOMAIN.
//  11. Everything else: forwarded, by the rules of package forward. With [AutopathAll]
//     that may walk the search list.
//
// What an own name answers depends on the type: addresses for A, AAAA and ANY;
// NODATA with an SOA record where there is none of that family, and for HTTPS
// and SVCB; any other type is NODATA for a Kubernetes host and forwarded for
// others. Zone transfers of names that are answered here are REFUSED.
//
// # Fast path and slow path
//
// A query is parsed, decided on and looked up in the cache once.
//
// The goroutine that reads a socket is the fast path ([handler.fast]): it answers mesh names,
// special-use names, local-only names, and what the cache has, from wire form to wire form.
// The kernel is asked for the original destination of a UDP query last: for what the cache
// answers, and for what is passed on, never for mesh names.
//
// A query that must wait, for nameservers or for the first table, and whatever is rare or
// malformed, is passed to a worker goroutine with what was found out so far: that is the
// slow path ([handler.slow]). A query that waited for the first table is decided on again.
//
// # Ownership
//
// A [Table] never changes once it is built. [Server.Load] builds one and makes
// it effective with a single atomic store; a query loads it once, so it sees
// one table from its first record to its last.
package dnsproxy
