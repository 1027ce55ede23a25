// Package upstream asks nameservers. It owns their sockets, remembers how each of them has
// behaved, and decides which one is asked when.
//
// # Which server is asked when
//
// Three things are known of a server: the smoothed time of its replies (RFC 6298: SRTT and
// RTTVAR), how long it has left probes unanswered, and whether other servers have answers
// where it has none. A query without a reply says nothing about the server, which may be
// waiting for the nameservers of the query's name; that is what probes are for.
//
//  1. A server is late for a query after SRTT + 4 RTTVAR, but never before 50 ms
//     nor after 400 ms; without any reply so far, after 200 ms. RTTVAR grows as in
//     RFC 6298 and shrinks sixteen times slower, so that a server of which one
//     reply in fifty takes long is late for few of them.
//
//  2. A server that is late for a query, and has sent nothing since the query was sent, is
//     probed with questions that it can answer itself: at most every 250 ms, after a while
//     every 2 s, over UDP unless it is asked over TCP or TLS only. Any reply ends this.
//
//     A server is silent when probes are unanswered for SRTT + 4 RTTVAR, at least 50 ms and
//     at most a second (400 ms without any reply so far). It is down after three rounds of
//     probes, or refused connections, and a second. It is failing when another server had an
//     answer to three queries in a row to which it said SERVFAIL, REFUSED or the like, or to
//     three queries while for a second it was late for all. Where rule 12 applies REFUSED does
//     not count: a server for internal names refuses all others. It is looping when a query
//     to it came back to this host (see [Group.Suspect]). Otherwise it is up.
//
//  3. Servers are ranked: up, failing, down. Those that are up rank in the order of
//     configuration, silent ones last. With Options.Fastest or Options.Rotate they rank by
//     SRTT, or by how long a silent one has been silent; those about as fast as the fastest
//     (half as much again and 5 ms) rank in the order of configuration, or at random. Looping
//     servers are not asked.
//
//  4. The best server is asked. When it is late the next is asked, and so on round and
//     round, waiting twice as long in each round up to 400 ms, until a reply comes
//     or the time is up. A server that is asked again is asked from another socket
//     with another ID. All attempts stay open until the query ends. The first
//     usable reply (NOERROR or NXDOMAIN) to any of them ends it, subject to rule 12.
//
//  5. A failure moves on to the next server at once, and the server that failed is not asked
//     again for this query. A failure is any other response code (with its bits in the OPT
//     record), a malformed reply, or a refused connection. When all servers have failed or
//     are down, the best failure is the answer.
//
//  6. A copy of a query is sent to a server of lower rank that has never been asked, or not
//     for 30 s (for 1 s before its fourth reply). A server that is silent, failing or down
//     gets a copy one second after it was last asked, then after 2, 4, ... up to 30 s until
//     it answers. So ranks are kept up to date, and one reply restores a server that was
//     down. No query waits for the reply to a copy. That reply is used only after the server
//     that was asked is late or has failed: otherwise the time at which a copy is due would
//     decide which server answers.
//
//  7. When all servers are down, all are asked at once, then repeatedly after pauses that
//     double up to 2 s.
//
//  8. With Options.Parallel all servers are asked at once, and each again as above.
//
//  9. When all servers have been silent (rule 2) for a second, and the number of waiting
//     queries times the shortest silence reaches 128 s (128 queries after a second, 64 after
//     two), further queries fail at once, so that they take no resources from queries to other
//     servers. Ten a second are sent nevertheless, and any reply ends this. A nameserver that
//     pauses for less than a second makes no query fail.
//
//  10. The first repetition of a query is always sent, unless it would go to a silent server.
//     Further repetitions because a server is late have a budget: 256 at once, refilled
//     with 2 for each usable reply and 100 a second. So a query whose packet was
//     lost is repeated even while other names have dead servers, and dead servers do not get a
//     flood of repetitions.
//
//  11. A message with an opcode other than QUERY (UPDATE, NOTIFY) is sent to the best server
//     only, and to the next only after a failure: it may change data, and must not do so
//     twice.
//
//  12. Where the order of configuration counts (without Options.Fastest, Rotate or
//     Parallel), a negative answer (NXDOMAIN, or NOERROR without an answer) is held while a
//     server earlier in the order is up, not silent, and has not replied yet: it may know
//     names that the other does not. If the earlier server is failing because of its response
//     codes, it is asked, and the answer is held until it is late. If it did not reply before
//     but got a copy (rule 6), the answer is held as long, since it may have recovered. A
//     truncated reply of an earlier server also wins over a negative answer.
//
//  13. After a truncated reply, the query is sent again over TCP, and when that is late, to
//     the next server. After a second without a whole reply, the truncated one is the answer.
//
// # Files
//
//	client.go            Client and its Config; Group; rule 9
//	exchange.go          one query: sends what its schedule decides
//	schedule.go          rules 3 to 8, 11 and 13, as a plain value without a clock
//	settle.go            the end of a query: replies that are held (rule 12), the answer, or the
//	                     best failure (rule 5)
//	history.go           rules 1, 2 and 10, and when a copy is due (rule 6); plain values, too
//	server.go            one server: its history and its sockets
//	probe.go             probes of servers that are late (rule 2), and for loops
//	attempt.go           one query to one server, in flight
//	socket.go            what UDP sockets and connections have in common
//	udp.go               UDP
//	stream.go, dial.go   connections over TCP and TLS
//	elsewhere.go         servers that are not configured
//	transfer.go          zone transfers
//	message.go           comparing and reading replies
//	spec.go, errors.go   names of servers; the error that has each server's cause
//
// # Sockets
//
// A query over UDP leaves from one of four connected sockets of a server, with an
// unpredictable ID. A socket is replaced after 128 queries or 5 s, and with it its port,
// which Linux picks at random from about 28,000 (RFC 5452). A reply must
// come from the server to this socket and have the ID and the question, byte for
// byte; all else that arrives is counted and ignored. With Config.MixCase the
// letters of the question are in random case. A server that does not keep the case is
// asked over TCP instead, and for ten minutes without mixing. Messages that are relayed
// (Verbatim) are sent as they are, and the question of their replies is compared without
// regard to case, since some servers fold it.
//
// TCP and TLS connections are kept for 30 s after their last query, and up to
// 128 queries share one (RFC 7766, 7858). The ages of sockets include the time while the machine
// was suspended; all other times do not. A query that a connection which had served before
// leaves unanswered when the peer closes it is sent once more on a new one. While a
// connection is silent for longer than rule 1 allows, other connections, at most four,
// are used instead: a NAT may have forgotten it, or names may be slow. A connection ends when
// the peer's kernel acknowledges nothing for 2 s (TCP_USER_TIMEOUT). It takes no more
// queries after one has timed out while nothing at all was received.
//
// A server that says FORMERR, NOTIMP or BADVERS to a query with an OPT record is asked again
// without (RFC 6891, section 6.2.2), and if that helps, for ten minutes. The same holds for a
// server that three times in a row answers probes without an OPT record but not those with
// one: a middlebox drops them. The third time that a query is sent to a server it has no
// OPT record if nothing with one has come back meanwhile and the client does not want
// signatures; an answer to it is taken as the same sign.
//
// Servers that are not configured, to which clients send queries of their own choice
// ([Client.Elsewhere]), follow the same rules within bounds of their own:
// 512 servers are remembered, and 512 sockets are open to all of them together. From 256
// on each new server evicts those asked least recently that have not replied.
// At most one line a second is logged about them.
//
// A zone transfer over TCP has a connection of its own, and all of its messages are passed
// on; there are at most 16 at a time.
//
// Without queries there are no goroutines and no sockets. With queries there is a reader for
// each open socket, two goroutines for each connection, and one that closes idle ones.
package upstream
