// Package nds receives the table of mesh hosts: it keeps an ADS stream to a control plane
// open and passes each pushed NameTable to an [ApplyFunc].
//
// To follow a push, read in this order: [Client.Run] (client.go) connects, and connects
// again after a failure; stream.run (stream.go) receives responses, computes the new set
// of resources, calls the apply function and sends ACK or NACK. One goroutine does all
// of it, so pushes are applied in the order in which they arrive. Another one writes the
// snapshot (snapshot.go), so a slow disk delays no push.
//
//	config.go        the settings
//	client.go        Client: connecting, back-off, the fallback to state-of-the-world
//	connection.go    address, TLS, token and keepalive
//	stream.go        one stream: the set of resources, nonce and version, ACK and NACK
//	node.go          the node: what the agent sends about the workload, and its changes
//	errors.go        the setting that an error comes from
//	failurelog.go    logging a failure once
//	workloadcert.go  the workload certificate: obtaining, saving and renewing it
//	ca.go            the request to the certificate authority
//	change.go        changes of single hosts, in wire form
//	hosts.go         the table of hosts: its shards and checksums
//	usechange.go     putting a change to use
//	snapshot.go      the last good table on disk: reading and writing it
//	snapshotfile.go  the content of that file
//	status.go        Status, and its metrics
//
// What a response means:
//
//   - The set of resources belongs to the stream. A new stream starts with an empty set
//     and announces no resources to the control plane, which therefore sends all of them
//     again; istiod does so in any case.
//   - A state-of-the-world response is the whole set. A response without resources is an
//     empty table.
//   - An incremental response adds, replaces and removes the resources that it names. A
//     response that names none changes nothing, so as the first one of a stream it
//     leaves the set, and the table, empty.
//   - A set with the same names and bytes as the one in use is not applied again.
//   - A response is ACKed after its set is in use. If it is malformed, or the apply
//     function returns an error, the whole response is NACKed with the reason, and set
//     and table stay as they are. If that was the first response of an incremental
//     stream, the following ones change the set in use, because the control plane will
//     not send the rest again.
//
// With [Config.Hosts] the client asks for changes of hosts (NameTable.Change in api/nds.proto).
// A response with one resource, which has no name and is a change, then means:
//
//   - It changes the table of hosts, in either variant. That table belongs to the client, not
//     to the stream: the first request of a stream has its checksums (NAMETAP_HOSTS) and
//     the revision of the last change (NAMETAP_REVISION), and the control plane sends only
//     what differs. If the table in use came in resources, the request has neither.
//   - Every entry has a checksum, and the change has that of the table after it. If that
//     differs, or if an entry that the client keeps has changed in memory, the table stays,
//     the response is NACKed with the hosts or buckets, and the stream ends. The next
//     one begins with the checksums of the entries as they are, so that the control plane
//     sends again those that are wrong.
//   - A response without a change replaces the table of hosts, and the other way round.
//
// The node of a stream is what [Config.Refresh] returns when the client connects. When it
// returns another node later, the client ends the stream and connects again.
//
// Where nothing renews the bearer token, the client exchanges it for a workload
// certificate (workloadcert.go), which it renews and saves in the state directory.
//
// If the control plane does not implement the incremental RPC, the client uses
// state-of-the-world for an hour, then tries the incremental RPC again. The table in use
// survives a lost stream and, with a state directory (snapshot.go), a restart.
package nds
