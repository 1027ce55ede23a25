package resolvconf

import (
	"fmt"
	"net/netip"
)

// WithoutSelf returns the servers that are not the agent itself, in their order,
// and a sentence for each that is, with the reason (F6). A server is the agent if
// a query to it arrives at one of the listeners: it is where one listens, or a
// listener is on the wildcard address of its family, with its port, and the
// server's address is loopback or one of local, the addresses of this host. A
// link-local address in local without a zone is meant on every interface.
//
// If that leaves none, there is nobody to ask: the agent must then say so to its
// clients (F7), as any server taken back would send it its own queries. A
// forwarder elsewhere that comes back to the agent is not seen here.
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

// selfReason says why server is the agent itself; empty if it is not.
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
			return fmt.Sprintf("it listens on %s, loopback included", l)
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

// same reports whether the addresses are equal; without a zone, one is meant in
// all of them.
func same(a, b netip.Addr) bool {
	return a == b || (a.Zone() == "" || b.Zone() == "") && a.WithZone("") == b.WithZone("")
}
