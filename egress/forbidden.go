package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// An addressRange is a range of addresses that no connection is made to.
type addressRange struct {
	prefix netip.Prefix
	what   string
}

// forbidden returns the ranges that a name may not lead to: whoever owns the name chooses its
// addresses, and clients would reach with the agent's rights what only this host may reach. Private
// addresses (RFC 1918) are allowed, because many external hosts have one.
func forbidden() []addressRange {
	ranges := []addressRange{
		{netip.MustParsePrefix("0.0.0.0/8"), "this host"},
		{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
		{netip.MustParsePrefix("169.254.0.0/16"), "link-local, and the metadata of clouds"},
		{netip.MustParsePrefix("100.100.100.200/32"), "the metadata of Alibaba Cloud"},
		{netip.MustParsePrefix("168.63.129.16/32"), "the metadata of Azure"},
		{netip.MustParsePrefix("192.0.0.192/32"), "the metadata of Oracle Cloud"},
		{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
		{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
		{netip.MustParsePrefix("::/127"), "this host"},
		{netip.MustParsePrefix("fe80::/10"), "link-local"},
		{netip.MustParsePrefix("fd00:ec2::/32"), "the metadata of AWS"},
		{netip.MustParsePrefix("fd20:ce::254/128"), "the metadata of Google Cloud"},
		{netip.MustParsePrefix("fd00:42::42/128"), "the metadata of Scaleway"},
		{netip.MustParsePrefix("fd00:c1::a9fe:a9fe/128"), "the metadata of Oracle Cloud"},
		{netip.MustParsePrefix("fd00:a9fe:a9fe::1/128"), "the metadata of Akamai Cloud"},
		{netip.MustParsePrefix("fd00:100::100:200/128"), "the metadata of Alibaba Cloud"},
		{netip.MustParsePrefix("ff00::/8"), "multicast"},
	}
	for _, prefix := range VIPs() {
		ranges = append(ranges, addressRange{prefix, "an automatic VIP"})
	}
	return ranges
}

// Prefixes of IPv6 addresses that hold an IPv4 address, and where in it (RFC 6052, section 2.1; RFC
// 3056, section 2; RFC 4291, section 2.5.5.1; RFC 2765, section 2.1). Of the prefix for local translators (RFC
// 8215), whose operators choose where the address is, it is the usual place.
const (
	nat64Offset      = 12
	sixToFourOffset  = 2
	compatibleOffset = 12
	translatedOffset = 12
)

// embedded returns the IPv4 address that an IPv6 address leads to through a translator or a tunnel.
func embedded(a netip.Addr) (netip.Addr, bool) {
	if a.Is4() {
		return netip.Addr{}, false
	}
	for _, kind := range []struct {
		prefix netip.Prefix
		offset int
	}{
		{netip.MustParsePrefix("64:ff9b::/96"), nat64Offset},
		{netip.MustParsePrefix("64:ff9b:1::/48"), nat64Offset},
		{netip.MustParsePrefix("2002::/16"), sixToFourOffset},
		{netip.MustParsePrefix("::/96"), compatibleOffset},
		{netip.MustParsePrefix("::ffff:0:0:0/96"), translatedOffset},
	} {
		if kind.prefix.Contains(a) {
			b := a.As16()
			return netip.AddrFrom4([4]byte(b[kind.offset : kind.offset+4])), true
		}
	}
	return netip.Addr{}, false
}

// forbids returns an error if an address of a name must not be connected to.
func (s *Server) forbids(ctx context.Context, to netip.AddrPort) error {
	addr, port := to.Addr().Unmap(), to.Port()
	plain := addr.WithZone("")
	for _, a := range []netip.Addr{plain, inner(plain)} {
		at := slices.IndexFunc(s.forbidden, func(r addressRange) bool { return r.prefix.Contains(a) })
		if at >= 0 {
			return fmt.Errorf("%s is %s", addr, s.forbidden[at].what)
		}
	}
	if slices.Contains(s.config.OwnPorts, port) && ownAddress(plain) {
		return fmt.Errorf("%s port %d is this agent", addr, port)
	}
	return nil
}

// inner returns the embedded address, or the address itself.
func inner(a netip.Addr) netip.Addr {
	if v4, ok := embedded(a); ok {
		return v4
	}
	return a
}

// ownAddress reports whether this host has an address now.
func ownAddress(addr netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // unknown, and the port is the agent's
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && prefix.Addr().Unmap() == addr
	})
}
