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
//  11. Everything else: forwarded.
//
// What an own name answers depends on the type: addresses for A, AAAA and ANY;
// NODATA with an SOA record where there is none of that family, and for HTTPS
// and SVCB; any other type is NODATA for a Kubernetes host and forwarded for
// others. Zone transfers of names that are answered here are REFUSED.
//
// # How a query is forwarded
//
// The first of these that applies.
//
//  1. A message that is no QUERY goes on as it came, to the nameserver that it was
//     captured on its way to, if that is known.
//  2. So does a query that was captured on its way to a nameserver that resolv.conf
//     does not name, or on its way past a forwarder on this host that resolv.conf names;
//     and one whose answer is for its client alone (without RD, with
//     EDNS options for nameservers, signed, a zone transfer), to any nameserver.
//     The OPT record of what goes on is that of the next hop, in both directions, unless
//     the message is signed.
//     A zone transfer over TCP is relayed with all of its messages.
//  3. What the cache has is answered from there.
//  4. With [AutopathAll] the search list is walked for the client, as below.
//  5. Nameservers are asked: those of the longest suffix that has its own, otherwise
//     resolv.conf's. Package upstream says which of them when. Who asks the same
//     meanwhile waits for the same reply; if none comes soon, the nameservers are probed
//     for a loop.
//  6. If none gives an answer, one that has expired is given (RFC 8767): to all clients
//     1.8 s after the first of them asked, and at once while nameservers are down or
//     failed to answer the question the last time. It is then asked again after 5 s,
//     10 s, 20 s and every 30 s, and no client waits for that.
//
// A reply that says that there is nothing is kept for 30 s at most if a nameserver before
// its own failed to answer: that one may know the name, and is back soon.
//
// When resolv.conf names other nameservers the cache is flushed. Each question that is
// asked carries the cache's generation from before its nameservers were chosen, and a
// reply of an older generation is not kept. Nor does a client join such a question: it
// is asked anew.
//
// # How the search list is walked
//
// A client's resolver that is to look up NAME asks for NAME.DOMAIN with each domain of
// the search list in turn, and then for NAME. With [AutopathAll] its first query gets the
// answer that it would have come to, behind a CNAME record.
//
//  1. The start of a walk is a query for A or AAAA below the first domain of the search
//     list, if NAME has fewer than ndots dots: with more, resolvers try NAME first. Names
//     below the other domains are answered as they are. So are queries with DO or CD,
//     whose clients would find our CNAME record unsigned.
//  2. What is asked for is answered as it is, unless it does not exist.
//  3. Otherwise the names that the resolver would try are all asked for at once. The first
//     of them, in its order, that has an address of either family is the target for both,
//     as in glibc's getaddrinfo. Whether one has is told by its A records, and by AAAA only
//     where it exists without: some nameservers deny that names without AAAA exist
//     (RFC 4074). Later ones are not waited for. For the family that the target lacks the
//     answer is NODATA without a CNAME record: who asks for that family only walks on.
//  4. A name whose nameservers fail is passed over, as in glibc, but what was found behind
//     it is kept for 2 s only. A name that is answered without nameservers, such as one of
//     the table, ends the walk: the client will ask for it.
//  5. Without a target the answer is that the name asked for does not exist, which is
//     true, and the client walks by itself.
//  6. The whole walk ends within [Config.UpstreamTimeout]. Names whose nameservers are
//     still silent then have failed.
//  7. What was found is kept until the first reply that it depends on expires, and is
//     never stale itself. While a reply that it is made of is stale, so is the answer,
//     and is not kept. It is refreshed by asking anew for what is about to expire.
//  8. A new table, search list or ndots begins with no walks in the cache.
//
// # Who answers
//
// The goroutine that reads a socket answers own names, and what the cache has,
// itself, from wire form to wire form ([responder.respond]). Where a UDP query was on its
// way to is asked of the kernel last: for what the cache has an answer to, and for what is
// handed on, never for own names. What it does not answer
// it hands on to [handler.serve], on a goroutine of its own: queries to be forwarded
// or held, and whatever is rare or malformed.
//
// # Ownership
//
// A [Table] never changes once it is built. [Server.Load] builds one and makes
// it effective with a single atomic store; a query loads it once, so it sees
// one table from its first record to its last.
package dnsproxy
