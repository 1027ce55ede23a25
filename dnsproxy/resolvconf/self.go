package resolvconf

import (
	"fmt"
	"net/netip"
)

// WithoutSelf returns the servers that are not the agent itself, in their order, and for each server that is the agent,
// a sentence with the reason (F6). A server is the agent if a query to it arrives at one of the listeners. Such a
// listener has the server's port, and either the server's address or the wildcard address of the family; with the
// wildcard address, the server's address must be loopback or one of local, the addresses of this host. A link-local
// address in local without a zone counts for every interface.
//
// If no server is left the agent must answer with an error (F7): any of the removed servers
// would send it its own queries. A forwarder on another host that forwards to the agent is
// not found here.
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
		case same(listen, addr):
			return fmt.Sprintf("it listens on %s", l)
		case !listen.IsUnspecified():
		case addr.IsLoopback():
			return fmt.Sprintf("it listens on %s, which includes loopback", l)
		default:
			for _, a := range local {
				if same(a.Unmap(), addr) {
					return fmt.Sprintf("it listens on %s, and %s is an address of this host", l, a)
				}
			}
		}
	}
	return ""
}

// same reports whether the addresses are equal. An address without a zone equals one with any
// zone.
func same(a, b netip.Addr) bool {
	return a == b || (a.Zone() == "" || b.Zone() == "") && a.WithZone("") == b.WithZone("")
}
