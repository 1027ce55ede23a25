// Package forward answers the queries that the table of mesh names does not: from a cache,
// or by asking nameservers.
//
// The caller parses a query and decides that it is to be forwarded. It passes a [Query] to
// [Forwarder.Lookup]. If the cache has no answer, the caller
// passes the query to [Forwarder.Begin], which returns once the query is sent. The goroutine that
// reads the nameserver's reply passes the result to the caller's [Client].
//
//	forward.go       the Forwarder: answers queries from the cache or by asking nameservers
//	metrics.go       counters
//	cachecontent.go  what the cache has, for commands
//	flight.go        questions in flight, each for all clients that ask the same; the limit of clients
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
//  1. A message other than a QUERY is relayed as it is, to its original destination if that
//     is known.
//  2. A query is also relayed to its original destination if it was captured on its way to
//     a nameserver that resolv.conf does not name, or if resolv.conf names a forwarder on this host and the
//     query was captured on its way to another host. A query whose answer is for its client alone (without
//     RD, with EDNS options for nameservers, signed, a zone transfer) is relayed, too: to its original
//     destination in these two cases, otherwise to the nameservers of rule 4. A relayed message has an OPT
//     record for the next hop, in both directions, unless the message is signed. A zone transfer over TCP is
//     relayed with all of its messages.
//  3. If the cache has a reply, it is the answer.
//  4. If suffixes of the name have their own nameservers, the nameservers of the longest such suffix are
//     asked, otherwise the nameservers of resolv.conf. Package upstream decides which of them is asked when.
//     Clients that ask the same meanwhile wait for the same reply. If no reply comes soon after a second
//     client has asked, the nameservers are probed for a loop.
//  5. If no nameserver answers, clients get a stale answer (RFC 8767): all of them 1.8 s
//     after the first one queried, or at once if nameservers are down or failed to answer
//     the question the last time. Nameservers are then queried again in the background,
//     after 5 s, 10 s, 20 s and every 30 s.
//
// If a nameserver that comes earlier in the order failed to answer, the reply of a later nameserver is cached for 30 s
// at most and not served stale: the earlier nameserver may know the name, and may recover soon. If a client wants
// signatures and the nameserver was queried without EDNS, the reply is not cached.
//
// When resolv.conf or the settings name other nameservers for some questions, the replies to these
// questions are flushed from the cache, and the cache begins a new generation. A question in flight
// has the generation from before its nameservers were chosen. If that generation has ended, the reply
// is not cached, and no more clients wait for it: when they ask, the question is sent again.
//
// # Bounds
//
// A client that waits takes one of Config.MaxInflight places. If none is free, the question that has been in flight for
// longest ends with an error, or with a stale answer, and its clients make room: nameservers answer most questions
// within milliseconds, so names with dead nameservers never keep other names from being asked. Nameservers that are
// silent are sent a few queries only (rule 7 of package upstream); a query whose nameservers are all silent ends no
// other query. Long queries are also bounded in bytes.
package forward
