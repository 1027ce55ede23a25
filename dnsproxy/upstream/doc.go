// Package upstream asks nameservers. It owns their sockets, remembers how each of them has
// behaved, and decides which one is asked when.
//
// # Which server is asked when
//
// The order is strict: it depends on whether servers live, not on what they answer.
//
//  1. A server is late for a query after SRTT + 4 RTTVAR (RFC 6298), but not before 50 ms and
//     at the latest after 400 ms; a server that has never replied, after 200 ms. RTTVAR shrinks sixteen times
//     slower than in RFC 6298. So a server that takes long for one query in fifty is rarely late.
//
//  2. Any reply, to a query or a probe, shows that a server lives. A server that has been late
//     for a query, and has sent nothing since the query was sent, is probed: it is asked one
//     question that it can answer itself: id.server, localhost, or the last question that it had
//     an answer to. If a probe is unanswered, the next question is asked after 250 ms; from the fourth
//     unanswered probe on, the pauses are 0.5, 1, 2 ... 30 s. A server that is down is probed
//     only while queries come. A server is silent while two probes are unanswered, and the later of them has
//     been unanswered for longer than SRTT + 4 RTTVAR (at least 50 ms, at most 1 s; 400 ms for a server that
//     has never replied). One probe does not suffice, because it may be lost. A server is down after three
//     unanswered probes or refused connections, but not earlier than 1 s after the first of these. A reply
//     ends both states. With Options.Fastest a server is also probed if nothing has come from it for 30 s.
//
//  3. Servers that live, or were never asked, rank before silent ones, and these before servers
//     that are down; among equals the order of configuration decides. With Options.Fastest, SRTT
//     decides, and the order of configuration only among servers about as fast as the fastest
//     (1.5 times its SRTT plus 5 ms). Servers that have sent a query back to this host ([Group.Suspect]) are
//     not asked.
//
//  4. The best server is asked, and when it is late the next one, round and round until a reply comes or the
//     time is up. In each round the waits are twice as long, up to 400 ms. A server that is asked again is
//     asked with another ID, and from another socket if it has several. All attempts stay in flight. The first
//     usable reply (NOERROR or NXDOMAIN) is the answer, subject to rule 6.
//
//  5. A server that fails for a question is not asked again for it, and the next server is asked at
//     once. Failures are any other response code (with its bits in the OPT record), a malformed
//     reply, and a refused connection. When all servers have failed, the best failure is the
//     answer: SERVFAIL before REFUSED, NOTIMP, FORMERR and the rest. Servers that are down may
//     be back: they are asked, too, all at once, and the query waits until they are late. The next
//     question begins with the best server again.
//
//  6. In strict order, a negative answer (NXDOMAIN, or NOERROR without an answer) is held while
//     an earlier server lives and has neither answered nor failed, but not after the time is up.
//     Earlier servers that were not asked yet are asked. A positive answer is not held. If an
//     earlier server is late, and replies before the time is up, its reply replaces the positive answer
//     in the cache. Any answer is provisional (kept for 30 s at most) unless all earlier servers have said
//     REFUSED or NOTIMP, as servers for internal names do.
//
//  7. When all servers are down, all are asked at once, then one after the other with pauses that
//     double up to 2 s. The first repetition of a query is always sent, unless it would go to a
//     silent server. Further repetitions because a server is late have a budget: 256 at once,
//     refilled with 2 for each usable reply and 100 a second. If a server owes 128 replies to queries,
//     and a reply to a probe, it is sent only probes, every 250 ms, until it has sent a reply.
//     Queries wait for this reply, and fail at once if the server is down and no other server is left.
//
//  8. A message with an opcode other than QUERY (UPDATE, NOTIFY) is sent once, to the best
//     server, and to the next only if the best could not be reached: the message may change data,
//     and must not do so twice. Any response code is an answer to it. After a truncated reply a
//     query is sent again over TCP, and when TCP is late or fails, to the next server. If no
//     whole reply has come after 1 s, or all servers have failed, the truncated reply is the answer.
//
// # Files
//
// A file uses the files below it. In addition, a server refers to its attempts, and to a group of its own, which has no
// other server.
//
//	client.go            Client and Group: starts queries, finds loops, knows servers that are not configured (elsewhere.go)
//	transfer.go          the end of a zone transfer
//	exchange.go          one query: does what its schedule decides when an event comes
//	trace.go             what an exchange has done, if the caller asks for it
//	schedule.go          rules 3 to 6 and 8, and the repetitions of rule 7, as a plain value without a clock
//	udp.go, stream.go    UDP; connections over TCP and TLS
//	socket.go            what UDP sockets and connections have in common
//	attempt.go           one query to one server, in flight
//	server.go            one server: its history, its sockets, and probes of it
//	refusals.go          failures in a row, without an answer between them; response codes that are counted
//	history.go           rules 1 and 2, and the budget of rule 7; plain values, too
//	probe.go             the questions of probes, also of probes for loops
//	shared.go            what a client and its servers share: settings, pools, goroutines
//	wheel.go             the timers of exchanges
//	message.go           comparing and reading replies
//	config.go, spec.go   settings, and what Status reports; names of servers
//	errors.go, dial.go   errors; options of TCP and TLS connections
//
// # Sockets
//
// A query over UDP leaves from one of four connected sockets of a server, with an unpredictable ID. (A server that is not
// configured has one socket.) A socket is replaced after 128 queries or 5 s. The new one has another port, which Linux
// picks at random from about 28,000 (RFC 5452). A reply must come from the server to this socket and have the ID and the
// question, whose case some servers fold; all else that arrives is counted and ignored.
//
// TCP and TLS connections are kept for 30 s after their last query. Up to 128 queries share a connection, and more
// once four connections are open (RFC 7766, 7858). The ages of sockets include the time while the machine
// was suspended; all other times do not. When the peer closes a connection over which a reply
// has come before, the queries that are unanswered are sent once more on another connection. While a
// connection is silent for longer than rule 1 allows, other connections, at most four,
// are used instead: a NAT may have forgotten the connection, or names may be slow. A connection ends when
// the peer's kernel acknowledges nothing for 2 s (TCP_USER_TIMEOUT). A connection takes no more
// queries after a query has timed out while nothing at all was received.
//
// If a query has an OPT record, and the reply is FORMERR or NOTIMP without one, or BADVERS, the server is asked again
// without an OPT record (RFC 6891, section 6.2.2). Some middleboxes drop packets with OPT records. So when a query is
// sent to a server for the third time, and no reply with an OPT record has come since the first time, the query has no
// OPT record. If it has the DO bit, no such reply must have come for ten minutes. If the server then answers, and has
// sent no OPT record for ten minutes, queries to it have no OPT record for the next ten minutes. FORMERR or NOTIMP with
// an OPT record is a failure for this question, and no sign against EDNS.
//
// Servers that are not configured, to which clients send queries of their own choice
// ([Client.Elsewhere]), follow the same rules within bounds of their own: 512 servers
// are remembered, and at most 512 sockets are open to all of them together. While 256 sockets or more
// are open, each new server evicts the servers asked least recently that have not replied. At
// most one line a second is logged about such servers.
//
// A zone transfer over TCP has a connection of its own, and all of its messages are relayed.
// There are at most 16 transfers at a time.
//
// Without queries there are no goroutines and no sockets. With queries there is one goroutine for
// each UDP socket, two for each connection, and one that closes idle sockets.
package upstream
