// Package push sends the tables of hosts to agents, over ADS in both variants, incremental and
// state-of-the-world.
//
// To follow a change, read in this order:
//
//  1. tables.go: [Service.Update] applies changed objects, updates the views, and queues the
//     sessions of their clients. broadcast.go pushes to them.
//  2. view.go: a view is what the clients of one namespace see: a base that it shares with others, except for
//     the hosts that only this namespace sees. Both are checksums by shard, and neither has a host.
//  3. session.go: a session is a stream. It sends its client what is new as soon as the client has
//     answered the last push, so a client that is slow gets one push for many changes.
//  4. change.go encodes changes, from the last ones of all hosts. resource.go encodes shards. Both do so once for
//     all clients, and codec.go sends these bytes without a copy for each client.
//
// agents.go says which table each client has, and which it should have.
//
// service.go serves streams; request.go decodes what is used of a request; node.go parses what a client says of
// itself; metrics.go counts.
//
// What a client is sent depends on what it merges (NAMETAP_MERGE):
//
//   - Nothing, as Istio's agent: one unnamed table. A change sends all of it.
//   - Hosts ("hosts"): one unnamed table. A change sends the hosts that have changed, and the
//     checksum of the table after it. A client that connects says which hosts it has, by 256
//     checksums, and is sent the shards that differ. The same goes for a client that is further
//     behind than the kept changes.
package push
