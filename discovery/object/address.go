package object

import (
	"fmt"
	"net/netip"
	"strings"
)

// ParseAddress parses an address of a ServiceEntry. For a CIDR with one address, it returns that address. For a
// larger CIDR, for 0.0.0.0, with which istiod marks a host without an address, and for other addresses to which a client
// cannot connect, it returns the zero Addr without an error.
func ParseAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if p, isPrefix := netip.ParsePrefix(text); isPrefix == nil {
		if !p.IsSingleIP() {
			return netip.Addr{}, nil
		}
		a, text, err = p.Addr(), p.Addr().String(), nil
	}
	switch {
	case strings.Contains(text, "/"):
		return netip.Addr{}, fmt.Errorf("want an IP address or a CIDR, got %q", text)
	case err != nil || a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("want an IP address, got %q", text)
	}
	if a = a.Unmap(); a.IsUnspecified() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return netip.Addr{}, nil
	}
	return a, nil
}

// A VIP is an automatic VIP in the status of a ServiceEntry.
type VIP struct {
	Host string // as in the spec, without a trailing dot
	Addr netip.Addr
}

// A VIPStatus is the status that a ServiceEntry should have.
type VIPStatus struct {
	Entry *ServiceEntry // the ServiceEntry for which VIPs were computed
	VIPs  []VIP
}

// AddVIPs adds VIPs from the status to e.VIPs. If a VIP is of a host that is not in e.Hosts, it sets StaleVIPs instead.
func (e *ServiceEntry) AddVIPs(all ...VIP) {
	hosts := make(map[string]bool, len(e.Hosts))
	for _, host := range e.Hosts {
		hosts[host] = true
	}
	for _, vip := range all {
		host := strings.TrimSuffix(vip.Host, ".")
		if !hosts[host] {
			e.StaleVIPs = true // the status is older than the spec
			continue
		}
		if e.VIPs == nil {
			e.VIPs = map[string][]netip.Addr{}
		}
		e.VIPs[host] = append(e.VIPs[host], vip.Addr)
	}
}
