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

// IsVIP reports whether an address is in a range of automatic VIPs, which are not routed anywhere. istiod gives VIPs of
// 240.240.0.0/16 and 2001:2::/48 (RFC 5180), package hosts of a larger part of 240.0.0.0/4 (RFC 1112, section 4).
// egress.VIPs returns the same ranges.
func IsVIP(a netip.Addr) bool {
	return netip.MustParsePrefix("240.128.0.0/9").Contains(a) || netip.MustParsePrefix("2001:2::/48").Contains(a)
}
