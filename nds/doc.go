// Package nds receives the table of mesh hosts: it keeps an ADS stream to a control plane
// open and passes each pushed NameTable to an [ApplyFunc].
//
// To follow a push, read in this order: [Client.Run] (client.go) connects, and connects
// again after a failure; stream.run (stream.go) receives responses; receiver.use (receiver.go) computes
// the new table and calls the apply function with the shards that differ; the stream sends ACK or NACK. One goroutine
// takes all these steps, so pushes are applied in the order in which they arrive. Another goroutine writes the
// snapshot (snapshot.go), so a slow disk delays no push.
//
//	client.go        Client: connecting again and again, following the node
//	stream.go        one stream: nonce and version, ACK and NACK
//	receiver.go      applying responses and the snapshot
//	snapshot.go      writing the last good table to disk; receiver.go reads it
//	snapshotfile.go  the content of the file with that table
//	hosts.go         the table: its shards and checksums
//	change.go        changes of single hosts, in wire form
//	rpc.go           the two variants of ADS, and their responses
//	workloadcert.go  the workload certificate: obtaining, saving and renewing it
//	ca.go            the request to the certificate authority
//	advice.go        for known errors, which setting to check
//	connection.go    address, TLS with its files, and keepalive; the pause before the next connection (back-off)
//	token.go         the bearer token
//	metrics.go       the metrics
//	status.go        Status, and the state that the other files record for it
//	config.go        the settings
//	node.go          the node: what the agent sends about the workload
//
// What a response means:
//
//   - A response has at most one NameTable, whose resource has no name. A NameTable with a Change (api/nds.proto)
//     changes the table in use; any other NameTable is the whole table. The client asks for changes (NAMETAP_MERGE in
//     the metadata of the node), but istiod ignores that and sends whole tables. Both kinds of tables are split into
//     shards in the same way, and are handled alike after that.
//   - A state-of-the-world response without a NameTable means an empty table. An incremental response without a
//     NameTable changes nothing, except at the start of a stream: the first response then means an empty table. There
//     is one exception: if the table in use came as changes, the first response changes nothing, either.
//   - A table with the same shards as the table in use is not applied again.
//   - A response is ACKed after its table is in use. If the response is malformed, or the apply
//     function returns an error, the response is NACKed with the reason, and the current table stays.
//   - A change has the checksum of the table after the change. If the client gets another checksum, the current table
//     stays, the NACK names the hosts in the change, and the stream ends.
//   - If the table in use came as changes, the first request of a stream has the checksums of the table's shards
//     (NAMETAP_HOSTS) and the revision of the last change (NAMETAP_REVISION). The control plane then
//     sends the shards that differ. After a wrong checksum, the client computes the checksums again from the entries. If
//     the checksum is wrong after the first change of a stream, the checksums in the first request did not show what
//     differs. So the first request of the next stream has neither checksums nor a revision.
//
// The node of a stream is the result of [Config.Refresh] when the client connects. When Refresh
// returns another node later, the client ends the stream and connects again.
//
// If nothing renews the bearer token, the client exchanges the token for a workload
// certificate (workloadcert.go). It renews this certificate, and saves it in the state
// directory.
//
// An attempt to connect is one connection. If the control plane does not implement the incremental RPC, the client uses
// state-of-the-world on the same connection. The table in use survives a lost stream and, with a state directory,
// a restart.
package nds
