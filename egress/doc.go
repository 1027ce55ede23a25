// Package egress carries connections to automatic VIPs. A control plane gives a VIP to an external host that has
// no address in the mesh: the host's name then has an answer. No machine has the VIP. The capture rules redirect
// TCP connections to VIPs to a [Server], which connects them to the host.
//
// # The way of a connection
//
//  1. The server accepts the connection. At the limit of connections it closes the connection that is idle
//     longest; if no connection is idle, it resets the new one at once.
//  2. Connection tracking says which VIP and port the client connected to (conntrack.OriginalOf).
//  3. The table says which host has the VIP. An unknown VIP is refused.
//  4. If the table has the ports of the host, the port must be one of them.
//  5. If the VIP has one host, which is no wildcard, the name is known and nothing is read: in many protocols the
//     server speaks first. If the VIP has a wildcard or several hosts, the client says which name it wants: in
//     the ClientHello of TLS (SNI) or in the Host field of HTTP/1. The VIP must stand for that name. Up to
//     [MaxHello] bytes are read, for up to five seconds.
//  6. Nameservers say which addresses the name has. The table is not asked: it would answer with the VIP. If the
//     table has endpoints for the port, these are used instead of the name: addresses, or names that nameservers
//     resolve. Some addresses are refused when they are dialled, such as loopback, link-local addresses, the
//     addresses of clouds' metadata, and VIPs.
//  7. The addresses are dialled as RFC 8305 says, from [Config.Sources], with [Config.Mark], or through
//     [Config.Proxy].
//  8. Both directions are copied until both have ended. Each peer sees what the other one did:
//     the end of its data, or a reset. A connection that is refused is reset.
//  9. A sweep over all connections closes the connections that are idle for [Config.IdleTimeout].
//
// One goroutine does all this, in a loop around epoll(7). For each connection, a task does steps 2 to 7: a
// coroutine, whose code is read from top to bottom. While a task waits, the loop goes on. Step 8 needs neither a
// goroutine nor a stack: each event moves what can be moved. A call that may block, such as the lookup of a name
// that is not cached, gets a goroutine of its own. So all connections together use one processor, and leave the
// other processors to queries.
//
// The name decides where a connection leads, never an address that the client chose. A client can still send
// another name inside TLS than in its SNI ("domain fronting"), to a server that has both names; only a proxy that
// ends TLS can prevent that.
//
//	server.go    steps 1, 2 and 9: accepting, limits, the task of a connection, the end
//	proxy.go     step 7 by CONNECT
//	dial.go      steps 6 and 7: from a name to addresses, and to a connection
//	copy.go      step 8: both directions, half-close and reset
//	name.go      step 5: reading the beginning of a connection, parsed by crypto/tls or net/http
//	route.go     steps 3 and 4: from a VIP and a port to a host
//	status.go    what the server counts for each host
//	listen.go    the listeners, of this process and of another one
//	quic.go      clients of QUIC, which use TCP after a Version Negotiation packet
//	forbidden.go addresses that are refused
//	endpoints.go step 4: from a port to the endpoints of the host
//	loop.go      the events of sockets, and tasks
//	refusals.go  why connections are refused
//	config.go    the settings
package egress
