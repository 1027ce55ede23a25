// Package dnsproxy answers DNS queries for mesh names from a table, and forwards all other queries.
//
// A query comes in at tcp.go or udp.go, and decide.go decides what is done with it. These are the files; each file
// uses only the files below it:
//
//	explain.go     the rule by which a question is answered, for nametap query
//	resolve.go     addresses of names for the agent itself
//	conditions.go  what is wrong with listeners and answers
//	server.go      Server: New, Run, Ready; Load, for a new table; Configure, for new settings
//	listen.go      the sockets, and who serves each
//	tcp.go         reading queries from TCP connections, and when a connection is closed
//	udp.go         reading queries from UDP sockets; clients that wait for nameservers; workers
//	udpmessage.go  a UDP packet with its addresses, without allocation
//	slow.go        the slow path: queries that are forwarded or held; rare and malformed ones
//	fast.go        the fast path: parse, decide, answer from the table or the cache
//	note.go        records and times of queries, for nametap tail and metrics
//	handler.go     what both paths share: a query on its way (task), how it came (arrival), and
//	               responses made from results of the forwarder
//	guarded.go     what the guard judges, and answers
//	rows.go        the rows of docs/behaviour.md by which a question is answered
//	writer.go      responses that nametap makes itself, record by record; the limit of their length
//	provenance.go  where one answer came from: which nameserver, and how old it is
//	metrics.go     counters
//	decide.go      the decision about a query, made once
//	config.go      the settings
//	origins.go     original destinations of captured queries
//
// # The order in which a query is answered
//
// The first rule that applies wins; decide.go decides.
//
//  1. A response, or a packet too short for a header: dropped and counted.
//  2. An opcode other than QUERY: forwarded unchanged.
//  3. Not exactly one question: FORMERR. An EDNS version other than 0: BADVERS.
//  4. Class CH: version.bind and id.server. Every other class except IN: REFUSED.
//  5. A special-use name (wire/names.go has the list): answered by nametap. But if a
//     setting names a suffix in that zone (--upstream onion=…, --bypass), this rule does not apply to names below it.
//  6. A bypassed name: forwarded. If the FQDN of a host is bypassed, the rules below do not find the host: not by a
//     short name, not with a search domain, and not by its address.
//  7. No table yet: as [BeforeSync] says.
//  8. The PTR name of an address: the FQDNs of the Services that have the address, sorted, at most 64. For a
//     headless Service, the record has the FQDN of the endpoint with the address. Types other than PTR are NODATA.
//     If only external hosts have the address, nameservers are asked first, and this is the answer if they do not
//     have the name.
//  9. A mesh name. The forms of mesh names are tried in this order: a. the FQDN of a Service or, at or below the
//     cluster domain, of any host (if two hosts have the same FQDN, the host of the registry Kubernetes wins, or else
//     the host with the smaller key); b. a part of a Service (an endpoint of a headless Service, or a port) followed by
//     its FQDN; c. unless the name is at or below the cluster domain, a short name of a Service: name.namespace,
//     name.namespace.svc, name in the agent's namespace, alternative names; d. and a part of a Service followed by
//     such a name; e. and the FQDN of an external host; f. a wildcard, the longest suffix first, if it is below the
//     cluster domain or svc just as the name is; g. autopath: one of a to f, followed by a domain of the search list.
//     With any domain but the first of the cluster's own domains in the list, nameservers are asked first, unless the
//     name is below svc.DOMAIN without it, and this is the answer if they do not have the name. External hosts have no
//     names with the later ones of the cluster's domains, nor names that rule 10 denies. Autopath answers with a CNAME
//     record. Its target is an FQDN if c or d applies, otherwise the name without the search domain. Nameservers are also
//     asked first for the labels before the suffix of a wildcard, or before a search domain below it, if there are
//     several: if they or the table have this name, or it is below svc.DOMAIN, the answer is NXDOMAIN.
//  10. A name that is nowhere: a local-only name, with or without a search domain after it; a name below svc.DOMAIN
//     with a search domain after it; a name below a Service of the cluster domain of which the ports are known, and a
//     name with underscores below its other names; an ancestor of mesh names at or below the cluster domain. NODATA
//     if the name is a local-only suffix itself or an ancestor of mesh names (RFC 8020), otherwise NXDOMAIN.
//  11. Any other name: forwarded, by the rules of package forward.
//
// Last, the guard judges what would be forwarded, unless it is about a name of the table: see package guard. A name that it
// denies is NXDOMAIN, or, if nameservers would be asked first and then the table, a name that they do not have. A name that
// it allows has its VIPs.
//
// The answer for a mesh name depends on the type. A, AAAA and ANY: its addresses, or NODATA with
// an SOA record if the name has no address of that family. AAAA of a name that has IPv4 addresses only: these within the
// prefix of the network's NAT64, if there is one. HTTPS and SVCB: NODATA. SRV: the ports of a
// Kubernetes host, if the table has them. Any other type: NODATA for a Kubernetes host,
// forwarded for other hosts. A name that is not the FQDN has a CNAME record to it, unless there is no record behind
// it; the answer to CNAME is this record. Zone transfers of names that nametap answers
// itself are REFUSED.
//
// If a host is an alias of another host (ExternalName), the answer is a CNAME record to the other host, followed by
// the records of the other host. A type that the table does not answer for the other host is forwarded.
//
// A nameserver's reply is not the whole answer either: [answerer.compose] has what the table adds.
//
// # Fast path and slow path
//
// Each query is parsed, decided on and looked up in the cache once.
//
// The goroutine that reads a socket takes the fast path ([front.answerFast]). It answers mesh names, special-use
// names, local-only names and cache hits, and unpacks no message for this. The original destination of a UDP query is
// needed only for cache hits and for queries that are forwarded. It is looked up last, because the lookup is a request
// to the kernel.
//
// The same goroutine forwards a query over UDP, and keeps a copy of the query's packet in a [udpClient]. The
// goroutine that reads the nameserver's socket sends the response to the client.
//
// The fast path passes all other queries to a worker goroutine, together with its results so far. Such queries are
// forwarded queries over TCP, queries that wait for the first table, and rare or malformed queries. The worker takes
// the slow path ([handler.answerSlow]). A query that has waited for the first table is decided on again. Probes over UDP
// take the slow path without a worker, because they must be answered while workers have too many queries.
//
// A goroutine that serves more than one client never waits for one of them: it takes no lock that is held during a system
// call, and no call of it waits for room. It sends with [syscall.RawConn.Control], which, unlike Write, cannot wait.
//
// # Ownership
//
// A [table.Table] is immutable. [Server.Load] builds the next one and stores it with one atomic
// store. A query loads the table once, so the whole answer comes from one table. In the same way
// the settings of answers are in an immutable [handler], and [Server.Configure] makes the next
// one. The forwarder has its settings and the content of resolv.conf in an immutable routing.
package dnsproxy
