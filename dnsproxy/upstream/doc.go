// Package upstream asks nameservers: it has their sockets, knows how each of them
// has behaved, and decides which is asked when.
//
// # Which server is asked when
//
// What is known of a server is the smoothed time of its replies (RFC 6298: SRTT and
// RTTVAR), for how long it has left probes unanswered, and whether other servers have
// answers where it has none. A query without a reply says nothing of the server, which
// may wait for the nameservers of the query's name; so it is probed.
//
//  1. A server is late for a query after SRTT + 4 RTTVAR, but never before 50 ms
//     nor after 400 ms; without any reply so far, after 200 ms. RTTVAR grows as in
//     RFC 6298 and shrinks sixteen times slower, so that a server of which one
//     reply in fifty takes long is late for few of them.
//  2. A server that is late for a query, and was not heard since the query was sent, is
//     probed with questions that it can answer itself (see life.go): at most every
//     250 ms, every 2 s after a while, over UDP unless it is asked over TCP or TLS only. Any
//     reply ends this. A server is silent when probes are unanswered for SRTT + 4 RTTVAR, 50 ms at least and a second at most (400 ms
//     without any reply so far), and down after three rounds
//     of probes (or refused connections) and a second. It is failing when for three
//     queries in a row it said SERVFAIL, REFUSED or the like while another server had an
//     answer, or when for a second it was late for every query, and another server has
//     answered three of these. Where rule 12 holds REFUSED does not count: servers that
//     have internal names only say so for all others. It loops when a query to it came back to us (see
//     [Group.Suspect]). Else it is up.
//  3. Servers are ranked: up, failing, down. Among those that are up the first in the order
//     of configuration ranks first; those that are silent (rule 2) come after the others.
//     With Options.Fastest or Options.Rotate, servers rank by SRTT, or by the time that
//     one has been silent; those that are about as fast as the best (half as much again
//     and 5 ms) rank in the order of configuration, or in random order. Those that loop
//     are not asked.
//  4. The best is asked. When it is late the next is asked, and so on round and
//     round, the time to wait doubled each round up to 400 ms, until a reply comes
//     or the time is up. A server that is asked again is asked from another socket
//     with another ID. All attempts stay open until the query ends, and the first
//     usable reply (NOERROR or NXDOMAIN) to any of them ends it, but for rule 12.
//  5. A failure moves on at once, and the server is not asked again for this query: one of
//     the other response codes (with the bits of them that an OPT record has), a malformed
//     reply, a refused connection. When all servers
//     have failed or are down, the best failure is the answer.
//  6. A copy of a query goes alongside to a server of lower rank that has never
//     been asked, or not for 30 s (for 1 s before its fourth reply); and to one that
//     is silent, failing or down a second after it was last asked, then after 2, 4, ...
//     up to 30 s until it answers. So ranks follow the servers, and one reply heals a
//     server that was down. A copy is never waited for, and its reply counts only
//     once the server that was asked is late or has failed: whose answer it is does
//     not depend on who was due for a copy.
//  7. When all servers are down all are asked at once, again and again, the time to
//     wait doubled up to 2 s.
//  8. With Options.Parallel all servers are asked at once, and each again as above.
//  9. When all servers are silent (rule 2), and the queries that wait, times the shortest
//     silence, come to 128 s (2,560 queries after 50 ms, 128 after a second), further ones
//     fail at once: they would cost what is needed to answer others. Ten a second are sent
//     all the same, and any reply ends it.
//  10. The first repetition of a query goes to a server that is not silent at any time.
//     Else asking again because a server is late has a budget: 256 times at once,
//     refilled with 2 for each usable reply and 100 a second. Lost packets are so made
//     good at any rate, beside names whose servers are dead too, and servers that are all
//     dead are not buried in repetitions.
//  11. What is no QUERY (UPDATE, NOTIFY) is sent to the best server only, and to the
//     next only after a failure: it may do something, and twice is not once.
//  12. Where the order of configuration counts (not with Options.Fastest, Rotate or
//     Parallel), a reply that says that there is nothing (NXDOMAIN, or NOERROR without an
//     answer) is held while a server that stands before its server is up and not silent,
//     and has yet to answer: that one may know what the other does not. One that is failing
//     because of its response codes is asked, and waited for until it is late; one that does
//     not answer is waited for as long if it was sent a copy (rule 6), since it may be back.
//     Nor does it win over a truncated reply of such a server.
//  13. A truncated reply is asked for over TCP, and when that is late from the next server;
//     after a second without a whole one it is the answer itself.
//
// # Sockets
//
// A query over UDP leaves from one of four connected sockets of a server, with an
// unpredictable ID; a socket is replaced after 128 queries or 5 s, so its port,
// which Linux picks at random from about 28,000, is too (RFC 5452). A reply must
// come from the server to this socket and have the ID and the question, byte for
// byte; what else arrives is counted and passed over. With Config.MixCase the
// letters of the question are in random case; a server that does not keep it is
// asked over TCP instead, and for ten minutes without mixing. Messages that are relayed
// (Verbatim) are sent as they are, and the question of their replies is compared without
// regard to case: some servers fold it.
//
// Over TCP and TLS connections are kept for 30 s after their last query, and up to
// 128 queries share one (RFC 7766, 7858). What a connection that had served before
// leaves unanswered when the peer closes it is asked once more on a new one. While a
// connection is silent for longer than rule 1 allows, other connections, at most four,
// are used instead: a NAT may have forgotten it, or names may be slow. It ends when the
// peer's kernel acknowledges nothing for 2 s (TCP_USER_TIMEOUT), and takes no more
// queries after one has timed out without a byte coming meanwhile.
//
// A server that says FORMERR, NOTIMP or BADVERS to a query with an OPT record is asked again
// without (RFC 6891, section 6.2.2), and if that helps, for ten minutes. So is one that
// answers probes without an OPT record three times in a row, and not those with one: a
// middlebox drops them. The third time that a query is sent to a server it goes without
// an OPT record if nothing with one has come back meanwhile and the client does not want
// signatures; an answer to it counts as such a sign, too.
//
// Servers that are not configured, to which clients send queries of their own choice
// ([Client.Elsewhere]), follow the same rules. They are kept within bounds of their own:
// 512 servers are remembered, and 512 sockets are open to all of them together; from 256
// on each new server takes the place of those asked least recently that have not replied.
// What the log says of them is at most one line a second.
//
// A zone transfer over TCP has a connection of its own, and all of its messages are passed
// on; there are 16 at a time.
//
// There are no goroutines and no sockets without queries: a reader for each open
// socket, two for a connection, and one that closes them.
package upstream
