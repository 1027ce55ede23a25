// Package push sends the tables of hosts to agents, over ADS in both variants, incremental and
// state-of-the-world.
//
// The files, in the order in which they use each other:
//
//  1. service.go: [Service.Update] passes changed objects to the tables, and queues the sessions for which something
//     has changed. broadcast.go pushes to them. streams.go lists the streams.
//  2. session.go: a session is a stream. It sends its client what is new as soon as the client has answered the last
//     push, so a client that is slow gets one push for many changes. record.go has the times of the client's answers,
//     and its NACKs. agents.go describes clients for operators.
//  3. tables.go has the hosts, the views and what each client has. It encodes each table, and each change of a table,
//     once for all clients. change.go keeps the last changes of all hosts.
//  4. view.go: a view is what the clients of one namespace see: a base that it shares with other views, except for the
//     hosts that only this namespace sees. Bases and views have a checksum for each shard (one of 512 groups of hosts),
//     but no hosts.
//  5. response.go encodes responses. All clients share the bytes of the tables in them. cache.go keeps what was
//     encoded. codec.go sends these bytes without a copy for each client.
//  6. request.go decodes what is used of a request, and node.go parses what a client says of itself. metrics.go counts.
//
// What a client is sent after a change depends on what it can merge. The client says this in the node metadata
// NAMETAP_MERGE:
//
//   - Nothing (Istio's agent): there is one unnamed table. After a change, the client is sent all of it.
//   - Hosts ("hosts"): there is one unnamed table. After a change, the client is sent the hosts that have changed, and
//     the checksum of the new table. A client that connects says which hosts it has, by 512 checksums, and is sent the
//     shards that differ. If a client lacks changes that are no longer kept, it is sent the shards that have changed.
package push
