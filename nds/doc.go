// Package nds receives the table of mesh hosts: it keeps an ADS stream to a control plane
// open and passes each pushed NameTable to an [ApplyFunc].
//
// To follow a push, read in this order: [Client.Run] (client.go) connects, and connects
// again after a failure; stream.run (stream.go) receives responses; receiver.use (receiver.go) finds what they change
// (table.go), and calls the apply function with the shards that differ; the stream sends ACK or NACK. One goroutine
// takes all these steps, so pushes are applied in the order in which they arrive. Another goroutine writes the
// snapshot (snapshot.go), so a slow disk delays no push.
//
//	conditions.go    what is wrong: with the connection, its credentials and the table
//	client.go        Client: connecting again and again, following the node
//	stream.go        one stream: nonce and version, ACK and NACK
//	receiver.go      applying responses and the snapshot
//	table.go         the table: its resources and shards, in wire form
//	snapshot.go      writing the last good table to disk; receiver.go reads it
//	rpc.go           the two variants of ADS, and their responses
//	workloadcert.go  the workload certificate: obtaining, saving and renewing it
//	ca.go            the request to the certificate authority
//	connection.go    address, TLS with its files, and keepalive; the pause before the next connection (back-off)
//	token.go         the bearer token
//	metrics.go       the metrics
//	status.go        Status, and the state that the other files record for it
//	config.go        the settings
//	node.go          the node: what the agent sends about the workload
//
// The table is the union of the NameTables of all named resources; one resource without a name is the whole table. The
// names are the control plane's: istiod sends one resource without a name or, in its incremental form, one for each
// host, and nametap-discovery one for each shard.
//
//   - A resource without a name replaces all others, and a named one replaces a resource without a name. A host may be
//     in several resources: [ApplyFunc] gets all of its entries, in any order.
//   - The first request of an incremental stream announces the versions of the resources in use. What it does not
//     announce, and the first response does not have, is gone: resources without a version, and one without a name.
//     Later responses have what changes. A resource of istiod that ends a response with all resources replaces all.
//   - A state-of-the-world response has all resources.
//   - A resource without a body is a heartbeat, and changes nothing. A state-of-the-world response with heartbeats only
//     changes nothing, either. The TTLs of resources do not count.
//   - Only shards that differ from those in use are applied.
//   - A response is ACKed after its table is in use. If the response is malformed, or the table would be too long, or the
//     apply function returns an error, the response is NACKed with the reason, and the current table stays.
//   - The version of a resource of nametap-discovery is a hash of the resource. If the resource has another hash, the
//     response is NACKed, and the stream ends.
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
