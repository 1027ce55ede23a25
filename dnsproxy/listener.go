package dnsproxy

import (
	"net/netip"
)

// An Addr is the address of a listener.
type Addr struct {
	Network string `json:"network"` // "udp" or "tcp"
	Address string `json:"address"` // host:port
}

// String returns the network and the address, as logs show them.
func (a Addr) String() string { return a.Network + " " + a.Address }

// port returns the port.
func (a Addr) port() uint16 {
	addr, _ := netip.ParseAddrPort(a.Address) // never fails for a listener
	return addr.Port()
}

// sortKey returns the sort key of a listener: IPv4 before IPv6, UDP before TCP.
func sortKey(a Addr) int {
	place := 0
	if addr, err := netip.ParseAddrPort(a.Address); err == nil && !addr.Addr().Is4() {
		place = 2
	}
	if a.Network == "tcp" {
		place++
	}
	return place
}

// A listener serves one socket.
type listener interface {
	addr() Addr
	// serve answers queries until stop is called. It returns after it has answered
	// every query that it has read. An error means that the socket no longer works.
	serve() error
	// stop makes serve end. It must be called at most once, before or during serve.
	stop()
	// close closes a socket on which serve was not called.
	close()
}
