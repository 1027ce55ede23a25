package resolvconf

import (
	"fmt"
	"net/netip"
)

// WithoutSelf removes the servers that are the agent itself. It returns the other servers in their order, and for
// each server that it removes, a sentence with the reason. listeners are the addresses on which the agent listens,
// and local are the addresses of this host.
//
// A server is the agent if a query to it arrives at one of the listeners. The listener must have the port of the
// server. It must also have the server's address, or the wildcard address of its family if the server's address is
// loopback or is in local. A link-local address in local that has no zone stands for this address on every
// interface.
//
// If no server is left, the caller must answer queries with an error: it would send them to itself if it used one of
// the removed servers. WithoutSelf does not find a forwarder on another host that forwards to the agent.
func WithoutSelf(servers, listeners []netip.AddrPort, local []netip.Addr) (others []netip.AddrPort, self []string) {
	for _, server := range servers {
		if reason := selfReason(server, listeners, local); reason != "" {
			self = append(self, fmt.Sprintf("nameserver %s is this agent: %s", server, reason))
			continue
		}
		others = append(others, server)
	}
	return others, self
}

// selfReason returns the reason why server is the agent itself; empty if it is not.
func selfReason(server netip.AddrPort, listeners []netip.AddrPort, local []netip.Addr) string {
	addr := hostOf(server.Addr().Unmap())
	for _, l := range listeners {
		listen := l.Addr().Unmap()
		switch {
		case l.Port() != server.Port() || listen.Is4() != addr.Is4():
		case sameAddr(listen, addr):
			return fmt.Sprintf("it listens on %s", l)
		case !listen.IsUnspecified():
		case addr.IsLoopback():
			return fmt.Sprintf("it listens on %s, which includes loopback", l)
		default:
			for _, a := range local {
				if sameAddr(a.Unmap(), addr) {
					return fmt.Sprintf("it listens on %s, and %s is an address of this host", l, a)
				}
			}
		}
	}
	return ""
}

// sameAddr reports whether the addresses are equal. An address without a zone equals one with any zone.
func sameAddr(a, b netip.Addr) bool {
	return a == b || (a.Zone() == "" || b.Zone() == "") && a.WithZone("") == b.WithZone("")
}
