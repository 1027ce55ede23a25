// Package family has the two families of IP addresses.
package family

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

// All returns both families.
func All() []Family { return []Family{IPv4, IPv6} }

// Of returns the family of an address.
func Of(addr netip.Addr) Family {
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
	for _, known := range All() {
		if string(text) == known.String() {
			*f = known
			return nil
		}
	}
	return fmt.Errorf("family %q: want %s or %s", text, IPv4, IPv6)
}

// Other returns IPv6 for IPv4, and IPv4 for IPv6.
func (f Family) Other() Family {
	if f == IPv4 {
		return IPv6
	}
	return IPv4
}

// Loopback returns the loopback address 127.0.0.1 or ::1.
func (f Family) Loopback() netip.Addr {
	if f == IPv4 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// Number returns the kernel's number of the family: AF_INET, which equals NFPROTO_IPV4, or AF_INET6.
func (f Family) Number() uint8 {
	if f == IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
