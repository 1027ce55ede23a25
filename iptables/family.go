package iptables

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Family is an IP version.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of an address.
func FamilyOf(addr netip.Addr) Family {
	if addr.Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "IPv4" or "IPv6".
func (f Family) String() string { return fmt.Sprintf("IPv%d", int(f)) }

// MarshalText returns the same as String.
func (f Family) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads what MarshalText returns.
func (f *Family) UnmarshalText(text []byte) error {
	for _, family := range families() {
		if string(text) == family.String() {
			*f = family
			return nil
		}
	}
	return fmt.Errorf("family %q: want %s or %s", text, IPv4, IPv6)
}

// Loopback returns the loopback address to which queries of this host are redirected.
func (f Family) Loopback() netip.Addr {
	if f == IPv4 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// loopbackPort returns the socket address of a UDP port of loopback.
func (f Family) loopbackPort(port uint16) unix.Sockaddr {
	if f == IPv4 {
		return &unix.SockaddrInet4{Port: int(port), Addr: f.Loopback().As4()}
	}
	return &unix.SockaddrInet6{Port: int(port), Addr: f.Loopback().As16()}
}

// number returns the kernel's number of the family, which AF_INET and NFPROTO_IPV4 share.
func (f Family) number() uint8 {
	if f == IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// other returns IPv6 for IPv4, and IPv4 for IPv6.
func (f Family) other() Family {
	if f == IPv4 {
		return IPv6
	}
	return IPv4
}

// families returns both families, in the order in which they are applied.
func families() []Family { return []Family{IPv4, IPv6} }
