// Package push sends the tables of hosts to agents, over ADS in both variants, incremental and
// state-of-the-world.
//
// The files, in the order in which they use each other:
//
//  1. service.go: [Service.Update] passes changed objects to the tables, and queues the sessions for which something
//     has changed. broadcast.go pushes to them. streams.go lists the streams.
//  2. session.go: a session is a stream. It sends its client what is new as soon as the client has
//     answered the last push, so a client that is slow gets one push for many changes. record.go has the times of the
//     client's answers, and NACKs; agents.go describes clients for operators.
//  3. tables.go has the hosts, the views and what each client has. It encodes tables and changes of them, once for all
//     clients. change.go has the last changes of all hosts.
//  4. view.go: a view is what the clients of one namespace see: a base that it shares with other views, except for
//     the hosts that only this namespace sees. Bases and views have checksums by shard, and no hosts.
//  5. response.go encodes responses, of which all clients share the bytes. cache.go keeps what was encoded. codec.go
//     sends these bytes without a copy for each client.
//  6. request.go decodes what is used of a request, and node.go parses what a client says of itself. metrics.go counts.
//
// The pushes to a client depend on what the client merges (NAMETAP_MERGE):
//
//   - Nothing, as Istio's agent: one unnamed table. A change sends all of it.
//   - Hosts ("hosts"): one unnamed table. A change sends the hosts that have changed, and the
//     checksum of the table after it. A client that connects says which hosts it has, by 256
//     checksums, and is sent the shards that differ. A client that is further behind than the kept
//     changes is sent the shards that have changed.
package push
