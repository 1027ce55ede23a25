package seen

import (
	"net"
	"net/netip"
	"time"
)

// hostAddrsAge is how long the addresses of this host are used before they are read again.
const hostAddrsAge = 5 * time.Second

// HostAddrs knows the addresses of this host. The zero value is ready for use: it reads the addresses when Has is
// called. Only one goroutine may use it at a time.
type HostAddrs struct {
	all    map[netip.Addr]bool
	readAt time.Time // when they were read
}

// Has reports whether an address belongs to this host. If the addresses cannot be read, it reports true for loopback
// addresses only.
func (h *HostAddrs) Has(addr netip.Addr, now time.Time) bool {
	if addr.IsLoopback() {
		return true
	}
	if now.Sub(h.readAt) > hostAddrsAge {
		addresses, err := net.InterfaceAddrs()
		if err != nil {
			return false
		}
		h.all, h.readAt = map[netip.Addr]bool{}, now
		for _, a := range addresses {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				h.all[prefix.Addr().WithZone("")] = true
			}
		}
	}
	return h.all[addr.WithZone("")]
}
