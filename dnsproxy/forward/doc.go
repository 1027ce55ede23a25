// Package forward answers queries that the table of mesh names does not answer. It answers them from a cache,
// or by asking nameservers.
//
// The caller parses a query and decides that it is to be forwarded. It passes a [Query] to
// [Forwarder.Lookup]. If the cache has no answer, the caller
// passes the query to [Forwarder.Begin], which returns once the query is sent. Later, the goroutine that
// reads the nameserver's reply passes the result to the caller's [Client].
//
//	conditions.go    what is wrong with the nameservers
//	forward.go       the Forwarder: answers queries from the cache or by asking nameservers
//	metrics.go       counters
//	cachecontent.go  what the cache has, for commands
//	flight.go        questions in flight, each for all clients that ask it; the limit of clients
//	query.go         a query, and what the cache had for it
//	result.go        the result of a query; a reply as a message of the DNS library
//	router.go        makes the routing, and a new one when the settings, resolv.conf or this host's addresses change
//	routing.go       which nameservers are asked for a name
//	config.go        the settings
//
// # How a query is forwarded
//
// The first rule that applies wins.
//
//  1. A message with an opcode other than QUERY is relayed as it is. It goes to its original destination if that
//     is known, otherwise to a nameserver of rule 4.
//
//  2. A captured query is one that a client sent to a nameserver, and that was redirected to the agent. It is
//     relayed to this nameserver, its original destination, unless resolv.conf names the nameserver. If
//     resolv.conf names a forwarder on this host, a captured query to any other host is relayed to its
//     original destination, too.
//
//     All other queries are for the nameservers of rule 4. Some of these are also relayed, because the answer
//     is only for one client: queries that have no RD bit, have EDNS options for nameservers, are signed, or
//     ask for a zone transfer. A relayed message keeps the transport over which the client has sent it.
//
//     A relayed message gets an OPT record for the next hop, in both directions, unless the message is signed. All
//     messages of a zone transfer over TCP are relayed.
//
//  3. If the cache has a reply, it is the answer.
//
//  4. If suffixes of the name have their own nameservers, the nameservers of the longest such suffix are
//     asked, otherwise the nameservers of resolv.conf. Package upstream decides which of them are asked, and
//     when. Clients that ask the same question before the reply has come wait for this reply.
//
//  5. If no nameserver answers, and the cache has a reply that has expired, this reply is the answer (RFC
//     8767). Clients get such a stale answer 1.8 s after the first of them has asked. They get it at once if
//     the nameservers are down, or failed to answer the question the last time. Nameservers are then queried
//     again in the background, after 5 s, 10 s and 20 s, and then every 30 s.
//
// If a nameserver fails to answer, a nameserver later in the order may reply. Such a reply is cached for 30 s at most
// and not served stale, because the earlier nameserver may know the name, and may recover soon. If a client wants
// signatures and the nameserver was queried without EDNS, the reply is not cached.
//
// When resolv.conf or the settings name other nameservers for some questions, the cache is flushed. Replies that are on
// their way at this moment may come from the previous nameservers, so they are not cached, and clients that ask from now
// on do not wait for them. To recognise such replies, the cache counts its flushes: this count is its generation, and it
// is noted before the nameservers for a question are chosen.
//
// # Bounds
//
// A client that waits takes one of Config.MaxInflight places. If none is free, the question that has been in flight
// for the longest time ends with an error, or with a stale answer, and its clients make room. Nameservers answer
// most questions within milliseconds, so this is a question whose nameservers are dead or slow. In this way, names with
// dead nameservers never keep other names from being asked. Long queries are also bounded in bytes.
//
// Nameservers that are silent are sent only a few queries (rule 7 of package upstream). If all nameservers of a query
// are silent like this, the query does not end another question to make room.
package forward
