// Package egress carries connections to automatic VIPs. A control plane gives a VIP (a virtual IP address) to an
// external host that has no address in the mesh. Then the agent can answer queries for the host's name. No machine
// has the VIP. The capture rules redirect TCP connections to VIPs to a [Server], which connects them to the host.
//
// # The way of a connection
//
//  1. The server accepts the connection. If there is no room for it, package connlimit decides which connection is closed.
//  2. Connection tracking says which VIP and port the client connected to (conntrack.OriginalTCP).
//  3. The table says which host has the VIP. An unknown VIP is refused.
//  4. If the table has the ports of the host, the port must be one of them.
//  5. If only one host has the VIP, and the host is no wildcard, the name is known. Then nothing is read from the
//     client, because in many protocols the host sends data first. If a wildcard or several hosts have the VIP,
//     the client says which name it wants: in the ClientHello of TLS (SNI) or in the Host field of HTTP/1. The
//     name must belong to one of these hosts. Up to [maxHello] bytes are read, for up to five seconds.
//     A VIP of the guard (package guard) has one name. If it is not known any more, it is the name that the client says. The
//     guard's policy must allow the name and the port. If the VIP has told the name, the client's first bytes are read only
//     beside step 8, because the host may speak first. They reach the host unless they say another name.
//  6. Nameservers say which addresses the name has. The table is not used for this: it would answer with the VIP.
//     If the table has endpoints for the port, the endpoints are used instead of the name. They are addresses, or
//     names that nameservers resolve. Some addresses are refused when they are dialled, such as loopback,
//     link-local addresses, the addresses of clouds' metadata, and VIPs.
//  7. The addresses are dialled as RFC 8305 says, from [Config.Sources], with [Config.Mark], or through
//     [Config.Proxy].
//  8. Both directions are copied until both have ended. Each peer sees how the other peer ended: with the end of
//     its data, or with a reset. A connection that is refused is reset.
//  9. A sweep over all connections closes the connections that are idle for [Config.IdleTimeout], or whose client has
//     reset them while nothing waits for it.
//
// A connection has two goroutines: the one that serves it from top to bottom, and, in step 8, one for the other direction.
// Attempts to connect and lookups that have to wait have goroutines of their own. A goroutine that serves more than one
// client, which accepts, sweeps or counts, makes no call that may wait for one: no read, write, lookup, log line or parse.
// What all connections share is held only while it is used: the lock for long beginnings by a parser that has bytes. A
// direction that waits for data holds no buffer.
//
// The kernel reports a reset to one call only. If a write gets the error, a read then returns the end of the data. So a
// direction takes an end for a reset if the connection is closed and a write has failed, unless the write says that the
// end came first (EPIPE).
//
// The name decides where a connection leads, never an address that the client chose. If a server has two names, a
// client can still send one of them in its SNI and the other inside TLS ("domain fronting"). Only a proxy that ends
// TLS can prevent that.
//
//	server.go    steps 1, 2 and 9: accepting, limits, the way of a connection, the end
//	proxy.go     step 7 by CONNECT
//	dial.go      steps 6 and 7: from a name to addresses, and to a connection
//	copy.go      step 8: both directions, half-close and reset
//	name.go      step 5: reading the beginning of a connection, parsed by crypto/tls or net/http
//	route.go     steps 3 and 4: from a VIP and a port to a host and its endpoints
//	guarded.go   steps 3 to 5: what the guard says
//	status.go    what the server counts for each host; why connections are refused
//	forbidden.go addresses that are refused
//	config.go    the settings
package egress
