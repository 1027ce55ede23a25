// Package upstream asks nameservers. It owns their sockets, remembers how each of them has
// behaved, and decides which one is asked when.
//
// # Which server is asked when
//
// The order is strict: it depends on whether servers live, not on what they answer.
//
//  1. A server is late for a query if it has not replied within SRTT + 4 RTTVAR (RFC 6298). This time is at least
//     50 ms and at most 400 ms. For a server that has never replied it is 200 ms. RTTVAR shrinks sixteen times
//     slower than in RFC 6298. So a server that takes long for one query in fifty is rarely late.
//
//  2. Any reply, to a query or a probe, shows that a server lives. A server is probed if it has been late
//     for a query and has sent nothing since the query was sent. A probe asks two questions that the server can
//     answer itself: id.server and localhost. If a probe is unanswered, the next one is sent after 250 ms, and
//     after three, after 1 s. A server that is down is probed only while queries come. With
//     Options.Fastest, a server is also probed if nothing has come from it for 30 s.
//
//     A server is down after three unanswered probes or refused connections, but not earlier than 1 s after the
//     first of these. One probe does not suffice, because it may be lost. Any reply ends this state.
//
//  3. Servers that live, or were never asked, come first; then servers that are down. Among equals, the order of
//     configuration decides. With Options.Fastest, the server with the least SRTT comes
//     first among equals. But servers that are about as fast, with an SRTT up to 1.5 times as long plus 5 ms, stay
//     in the order of configuration. Servers that have sent a query back to this host ([Client.Echo]) are not asked.
//     To find them, a server that is late is sent a loop probe, at most one a second.
//
//  4. The best server is asked, and when it is late the next one, round and round until a reply comes or the
//     time is up. In each round the waits are twice as long, up to 2 s. If no other server is left, the bound of
//     400 ms does not hold: queries that are repeated would keep an overloaded server overloaded. A server that is
//     asked again is asked with another ID, and from another socket if it has several. All attempts stay in
//     flight. The first usable reply (NOERROR or NXDOMAIN) is the answer, subject to rule 6.
//
//  5. A server that fails for a question is not asked again for it, and the next server is asked at once.
//     Failures are a response code other than NOERROR and NXDOMAIN, a malformed reply, and a refused
//     connection. The response code includes the bits in the OPT record. When all servers have failed, the
//     best failure is the answer: SERVFAIL before REFUSED, NOTIMP, FORMERR and the rest. But servers that are
//     down may be back. So before a failure becomes the answer, all of these are asked at once, and the query
//     waits until they are late. The next question begins with the best server again.
//
//  6. Without Options.Fastest, a negative answer (NXDOMAIN, or NOERROR without an answer) is held while an
//     earlier server lives and has neither answered nor failed, at most until the time is up. A positive answer
//     is not held. An answer is provisional, and kept for 30 s at most, unless all earlier servers have said
//     REFUSED or NOTIMP. A server for internal names says so for all other names.
//
//  7. When all servers are down, all are asked at once, then one after the other. A server that is down and owes
//     replies to 128 queries is full: it is sent only probes until it has sent a reply. If no other server is left,
//     queries fail at once.
//
//  8. A message with an opcode other than QUERY (UPDATE, NOTIFY) is sent to the best server, and to the next
//     one only if the best could not be reached. It is not sent again, because it may change data, and must
//     not do so twice. Any response code is an answer to it. After a truncated reply a query is sent again
//     over TCP, and when TCP is late or fails, to the next server. If no whole reply has come after 1 s, or
//     all servers have failed, the truncated reply is the answer.
//
// # Files
//
// A file uses the files below it. In addition, a server refers to its attempts, and to a group in which it is the only
// server.
//
//	client.go            Client and Group: the servers, also those that are asked although they are not configured
//	transfer.go          zone transfers
//	ask.go               one query, from its start to its answer: rules 3 to 8
//	attempt.go           one query to one server, in flight
//	loop.go              servers whose queries come back
//	server.go            one server: its history, its sockets, probes of it, and failures in a row
//	udp.go, stream.go    UDP; connections over TCP and TLS
//	socket.go            what UDP sockets and connections have in common
//	history.go           rules 1 and 2, as a plain value without a clock
//	message.go           comparing and reading replies
//	config.go, spec.go   settings, and what Status reports; names of servers
//	errors.go            errors
//
// # Sockets
//
// A query over UDP leaves from one of four connected sockets of a server, with an unpredictable ID. A reply must come
// from the server to this socket and have the ID and the question of the query. Only the case of the question's letters
// may differ, because some servers fold it. All other packets are counted and ignored. Sockets are replaced soon (udp.go),
// so that their ports are hard to find (RFC 5452).
//
// Queries over TCP and TLS share connections (stream.go; RFC 7766, 7858). When the peer closes a connection over which a
// reply has come before, the queries that are unanswered are sent again on another connection. The ages of sockets include
// the time while the machine was suspended; all other times do not.
//
// If a query has an OPT record, and the reply says that the server does not support EDNS, the server is asked again
// without an OPT record (RFC 6891, section 6.2.2). Such a reply is BADVERS, or it is FORMERR or NOTIMP and has no OPT
// record. FORMERR or NOTIMP with an OPT record is a failure for this question, and no sign against EDNS.
//
// Clients may also send queries to servers that are not configured ([Client.Elsewhere]). The same rules apply
// to these servers, but they have bounds of their own: 256 servers are remembered, and at most 512 sockets are open to
// all of them together. A further server evicts the one that was asked least recently. Nothing is logged about such
// servers.
//
// A zone transfer over TCP has a connection of its own, and all of its messages are relayed.
// There are at most 16 transfers at a time.
//
// Without queries there are no goroutines and no sockets. With queries there is one goroutine for
// each UDP socket, two for each connection, and one that closes idle sockets.
package upstream
