// Package push sends the tables of hosts to agents, over ADS in both variants, incremental and
// state-of-the-world.
//
// The files, in the order in which they use each other:
//
//  1. service.go: [Service.Update] passes changed objects to the tables, and queues the sessions for which something
//     has changed. broadcast.go pushes to them.
//  2. session.go: a session is a stream. It sends its client what is new as soon as the client has answered the last
//     push, so a client that is slow gets one push for many changes. agents.go describes clients for operators.
//  3. tables.go has the hosts and the views. A view is what the clients of one namespace see. It shares the shards of a
//     base with other views, except for those in which a host lies that only this namespace sees.
//  4. table.go: a table has a version for each shard (one of 512 groups of hosts), but no hosts. A session knows which
//     table its client has, and sends the shards in which the current one differs.
//  5. response.go encodes responses. All clients share the bytes of the shards in them, which are made when a stream needs
//     them. The codec sends these bytes without a copy for each client.
//  6. request.go has what is used of a request, and node.go parses what a client says of itself. metrics.go counts.
//
// What a client is sent depends on the client features in its node:
//
//   - With "nametap.named-tables", in the incremental variant: a resource for each shard, named by its number. A client
//     that connects announces the versions that it has, and is sent what differs.
//   - Without (Istio's agent): one resource without a name, which is the whole table.
package push
