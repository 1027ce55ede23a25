// Package forward answers the queries that the table of mesh names does not: from a cache,
// or by asking nameservers.
//
// The caller parses a query and decides that it is to be forwarded. It passes a [Query] to
// [Forwarder.Lookup], which may be called on the fast path. If the cache has no answer, it
// passes the query to [Forwarder.Answer], which blocks.
//
//	config.go      the settings
//	forward.go     the Forwarder: New, Run and what others may ask of it
//	query.go       a query and its result; messages that are relayed as they are
//	resolve.go     questions that are cached: lookup, refresh, stale answers
//	walk.go        walking the search list
//	unpack.go      replies as messages of the DNS library
//	flight.go      questions in flight, one for all clients that ask the same
//	bounds.go      the bounds of queries in flight: their number, shared among domains, and
//	               bytes
//	routing.go     which nameservers are asked for a name; following resolv.conf
//	cacheadmin.go  looking into the cache, and flushing it
//	metrics.go     what is counted
//
// # How a query is forwarded
//
// The first rule that applies wins.
//
//  1. A message other than a QUERY is relayed as it is, to its original destination if that
//     is known.
//  2. So is a query that was captured on its way to a nameserver that resolv.conf does not
//     name, or on its way past a forwarder on this host that resolv.conf names; and a query
//     whose answer is for its client alone (without RD, with EDNS options for nameservers,
//     signed, a zone transfer), to any nameserver. The OPT record of a relayed message is
//     that of the next hop, in both directions, unless the message is signed. A zone
//     transfer over TCP is relayed with all of its messages.
//  3. If the cache has a reply, it is the answer.
//  4. If the query starts a walk of the search list, the list is walked as below.
//  5. Nameservers are asked: those of the longest suffix that has its own, otherwise those
//     of resolv.conf. Package upstream says when which of them is asked. Clients that ask
//     the same meanwhile wait for the same reply; if none comes soon, the nameservers are
//     probed for a loop.
//  6. If none answers, clients get a stale answer (RFC 8767): all of them 1.8 s after the
//     first one queried, or at once if nameservers are down or failed to answer the question
//     the last time. Nameservers are then queried again in the background, after 5 s, 10 s,
//     20 s and every 30 s.
//
// A negative reply is cached for 30 s at most if a nameserver that comes earlier in the order
// failed to answer: that one may know the name, and may recover soon.
//
// When resolv.conf names other nameservers, the cache is flushed and its generation ends. A
// question in flight has the generation from before its nameservers were chosen. If that is
// not the current one, its reply is not cached, and no more clients wait for it: the question
// is sent again.
//
// # How the search list is walked
//
// A resolver that looks up NAME asks for NAME.DOMAIN with each domain of the search list in
// turn, and then for NAME. A walk gives its first query the answer that it would find last,
// behind a CNAME record.
//
//  1. A walk starts at a query for A or AAAA below the first domain of the search list, if
//     NAME has fewer than ndots dots: with more, resolvers try NAME first. Names below the
//     other domains are answered as they are. So are queries with DO or CD, whose clients
//     would find the CNAME record unsigned.
//  2. The question's name is answered as it is, unless it does not exist.
//  3. Otherwise the names that the resolver would try are looked up at the same time. The
//     first of them, in its order, that has an address of either family is the target for
//     both, as in glibc's getaddrinfo. The walk looks up A first, and AAAA only for
//     a name that exists without A records: some nameservers answer NXDOMAIN to AAAA of names
//     that exist (RFC 4074). The walk does not wait for names after the target. For a family
//     that the target lacks, the answer is NODATA without a CNAME record, so a client that
//     wants only that family continues its walk.
//  4. If the nameservers of a name fail, the walk skips the name, as glibc does. A result from
//     a later name is then cached for only 2 s. A name that nametap answers itself, such as one of the
//     table, ends the walk, because the client will query it. The caller says which names
//     these are ([Query].Steps).
//  5. If there is no target, the answer is NXDOMAIN for the question's name, and the client
//     continues the walk itself.
//  6. The whole walk ends within [Config].Timeout. Names without a reply by then have failed.
//  7. The result is cached until the first reply that it depends on expires. If one of these
//     replies is stale, the answer is stale, too, and is not cached. A refresh queries again
//     the replies that are about to expire.
//  8. When the table, the search list or ndots changes, all walks are removed from the cache.
//
// # Bounds
//
// A query that waits takes a slot. Slots are shared among domains, so that names with dead
// nameservers leave slots for others. A query that gets no slot fails at once, or gets a stale
// answer. Long queries are also bounded in bytes.
package forward
