// Package forward answers the queries that the table of mesh names does not: from a cache,
// or by asking nameservers.
//
// The caller parses a query and decides that it is to be forwarded. It passes a [Query] to
// [Forwarder.Lookup], which may be called on the fast path, and if the cache has no answer
// to [Forwarder.Answer], which blocks.
//
//	config.go      the settings
//	forward.go     the Forwarder: New, Run and what others may ask of it
//	query.go       a query and its result; messages that are relayed as they are
//	resolve.go     questions that are cached: lookup, refresh, stale answers
//	walk.go        walking the search list
//	flight.go      questions in flight, one for all clients that ask the same
//	slots.go       the bound of queries in flight, shared among domains
//	memory.go      the bound of long queries, in bytes
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
//  3. What the cache has is answered from there.
//  4. If the query starts a walk of the search list, the list is walked as below.
//  5. Nameservers are asked: those of the longest suffix that has its own, otherwise those
//     of resolv.conf. Package upstream says when which of them is asked. Clients that ask
//     the same meanwhile wait for the same reply; if none comes soon, the nameservers are
//     probed for a loop.
//  6. If none answers, an expired answer is given (RFC 8767): to all clients 1.8 s after the
//     first of them asked, and at once while nameservers are down or failed to answer the
//     question the last time. Nameservers are then asked again after 5 s, 10 s, 20 s and
//     every 30 s, and no client waits for that.
//
// A negative reply is cached for 30 s at most if a nameserver before its own failed to
// answer: that one may know the name, and may be back soon.
//
// When resolv.conf names other nameservers the cache is flushed. Each question that is
// asked carries the cache's generation from before its nameservers were chosen, and a reply
// of an older generation is not cached. No client joins such a question any more: it is
// asked again.
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
//     both, as in glibc's getaddrinfo. The A records say whether one has, and AAAA only
//     where the name exists without: some nameservers deny that names without AAAA exist
//     (RFC 4074). The walk does not wait for later ones. For the family that the target
//     lacks, the answer is NODATA without a CNAME record: a client that asks for that
//     family only walks on.
//  4. A name whose nameservers fail is passed over, as in glibc, but what was found behind
//     it is cached for 2 s only. A name that nametap answers itself, such as one of the
//     table, ends the walk: the client will ask for it. The caller says which these are
//     ([Query].Steps).
//  5. Without a target the answer is that the question's name does not exist, which is true,
//     and the client walks by itself.
//  6. The whole walk ends within [Config].Timeout. Names whose nameservers are still silent
//     then have failed.
//  7. The result is cached until the first reply that it depends on expires, and is never
//     stale itself. While a reply that it is made of is stale, so is the answer, and it is
//     not cached. It is refreshed by asking again for the replies that are about to expire.
//  8. A new table, search list or ndots starts with no walks in the cache.
//
// # Bounds
//
// A query that waits takes a slot. Slots are shared among domains, so that names whose
// nameservers are dead leave slots for others; a query that gets none fails at once, or
// gets an expired answer. Long queries are also bounded in bytes.
package forward
