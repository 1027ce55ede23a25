package agent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// InstanceIPs returns the addresses of the node: first, if it is valid, then the global
// addresses of the interfaces, in the order of the kernel. The control plane sends addresses
// of the families that the node has.
func InstanceIPs(first netip.Addr) ([]netip.Addr, error) {
	var ips []netip.Addr
	if first.IsValid() {
		ips = append(ips, first.Unmap())
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of the interfaces: %w", err)
	}
	for _, addr := range addrs {
		prefix, err := netip.ParsePrefix(addr.String())
		if err != nil {
			continue // an address of neither family
		}
		if ip := prefix.Addr().Unmap(); ip.IsGlobalUnicast() && !slices.Contains(ips, ip) {
			ips = append(ips, ip)
		}
	}
	if len(ips) == 0 {
		// Control planes need an address in the identity of a node, even if the host has
		// only loopback.
		ips = append(ips, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	return ips, nil
}
