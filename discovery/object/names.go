package object

import (
	"fmt"
	"net/netip"
	"strings"
)

const (
	maxHostLength  = 253
	maxLabelLength = 63
	wildcardPrefix = "*."
)

// IsWildcard reports whether a host has the form *.suffix, which stands for all names below suffix.
func IsWildcard(host string) bool { return strings.HasPrefix(host, wildcardPrefix) }

// IsHost reports whether s is a DNS name, with or without a leading "*.".
func IsHost(s string) bool {
	s = strings.TrimPrefix(s, wildcardPrefix)
	if s == "" || len(s) > maxHostLength {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !IsLabel(label) {
			return false
		}
	}
	return true
}

// IsLabel reports whether s is a label of a DNS name. Underscores are not valid in host names,
// but they are in use, so IsLabel allows them.
func IsLabel(s string) bool {
	if s == "" || len(s) > maxLabelLength || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}

// ImportHost returns the host of a ServiceImport (KEP-1645). It may be longer than a DNS name.
func ImportHost(k Key) string { return k.Name + "." + k.Namespace + ".svc.clusterset.local" }

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
