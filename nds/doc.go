// Package nds receives the table of mesh hosts: it keeps an ADS stream to a control plane
// open and passes each pushed NameTable to an [ApplyFunc].
//
// To follow a push, read in this order: [Client.Run] (client.go) connects, and connects
// again after a failure; stream.run (stream.go) receives responses; receiver.use (receiver.go) computes
// the new table and calls the apply function with the shards that differ; the stream sends ACK or NACK. One goroutine does all
// of it, so pushes are applied in the order in which they arrive. Another one writes the
// snapshot (snapshot.go), so a slow disk delays no push.
//
//	client.go        Client: connecting again and again, following the node, the fallback to state-of-the-world
//	stream.go        one stream: nonce and version, ACK and NACK
//	receiver.go      applying responses and the snapshot
//	snapshot.go      writing the last good table to disk
//	snapshotfile.go  the content of that file
//	hosts.go         the table: its shards and checksums
//	change.go        changes of single hosts, in wire form
//	rpc.go           the two variants of ADS, and their responses
//	workloadcert.go  the workload certificate: obtaining, saving and renewing it
//	ca.go            the request to the certificate authority
//	advice.go        the setting that an error comes from
//	connection.go    address, TLS and keepalive; the pause before the next connection (back-off)
//	token.go         the bearer token
//	metrics.go       the metrics
//	status.go        Status, and what the parts record for it
//	config.go        the settings
//	node.go          the node: what the agent sends about the workload
//
// What a response means:
//
//   - It has one NameTable, without a name, or none. A NameTable is the whole table or, if it has
//     a Change (api/nds.proto), changes the table in use. The client asks for changes
//     (NAMETAP_MERGE); istiod sends whole tables. Both are split into the same shards, and take the
//     same way from there.
//   - A state-of-the-world response without a NameTable means an empty table. An incremental one
//     changes nothing, except as the first response of a stream: then it means an empty table,
//     unless the client has reported a table.
//   - A table with the same shards as the table in use is not applied again.
//   - A response is ACKed after its table is in use. If it is malformed, or the apply
//     function returns an error, it is NACKed with the reason, and the table stays as it is.
//   - A change has the checksum of the table after it. If the result has another one, the table stays,
//     the response is NACKed with the hosts that it changes, and the stream ends.
//   - If the table in use came as changes, the first request of a stream has its checksums by shard
//     (NAMETAP_HOSTS) and the revision of the last change (NAMETAP_REVISION), and the control plane
//     sends the shards that differ. After a difference they are computed again from the entries. If
//     the first change of a stream has the difference, the checksums do not show what differs, and
//     the next request has none.
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
