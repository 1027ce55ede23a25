package egress

import (
	"context"
	"net/netip"
	"slices"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/nat64"
)

// forbidden returns the ranges to which a name may not lead, and what each is. The owner of a name chooses its addresses,
// so without these ranges a client could use the agent to reach services that only this host may reach. Private addresses
// (RFC 1918) are allowed, because many external hosts have such an address.
func forbidden() map[netip.Prefix]string {
	ranges := map[netip.Prefix]string{}
	for prefix, name := range map[string]string{
		"0.0.0.0/8":              "this host",
		"127.0.0.0/8":            "loopback",
		"169.254.0.0/16":         "link-local, and the metadata of clouds",
		"100.100.100.200/32":     "the metadata of Alibaba Cloud",
		"168.63.129.16/32":       "the metadata of Azure",
		"192.0.0.192/32":         "the metadata of Oracle Cloud",
		"224.0.0.0/4":            "multicast",
		"255.255.255.255/32":     "broadcast",
		"::/127":                 "this host",
		"fe80::/10":              "link-local",
		"fd00:ec2::/32":          "the metadata of AWS",
		"fd20:ce::254/128":       "the metadata of Google Cloud",
		"fd00:42::42/128":        "the metadata of Scaleway",
		"fd00:c1::a9fe:a9fe/128": "the metadata of Oracle Cloud",
		"fd00:a9fe:a9fe::1/128":  "the metadata of Akamai Cloud",
		"fd00:100::100:200/128":  "the metadata of Alibaba Cloud",
		"ff00::/8":               "multicast",
	} {
		ranges[netip.MustParsePrefix(prefix)] = name
	}
	for _, prefix := range VIPs() {
		ranges[prefix] = "an automatic VIP"
	}
	for _, prefix := range guard.VIPs() {
		ranges[prefix] = "a VIP of the guard"
	}
	return ranges
}

// translations returns the prefixes of IPv6 addresses that lead, through a translator or a tunnel, to the IPv4 address that
// they contain, and the index of the byte at which that address begins (RFC 6052, section 2.1; RFC 3056, section 2; RFC
// 4291, section 2.5.5.1; RFC 2765, section 2.1). In the prefix for local translators (RFC 8215), operators choose the
// place: any of RFC 6052, section 2.2.
func translations() map[netip.Prefix][]int {
	return map[netip.Prefix][]int{
		netip.MustParsePrefix("64:ff9b::/96"): {12}, netip.MustParsePrefix("64:ff9b:1::/48"): {6, 7, 8, 12},
		netip.MustParsePrefix("2002::/16"): {2}, netip.MustParsePrefix("::/96"): {12}, netip.MustParsePrefix("::ffff:0:0:0/96"): {12},
	}
}

// A reach says to which addresses a connection may lead.
type reach uint8

const (
	normally reach = iota // to all that are not forbidden
	publicly              // of these, to those that are not private
	anywhere
)

// A fence refuses addresses to which no connection may be made. It is safe for concurrent use.
type fence struct {
	ranges   map[netip.Prefix]string
	ownPorts []uint16
	nat64    *nat64.Finder
}

// newFence returns the fence of a server.
func newFence(cfg *Config) *fence {
	return &fence{forbidden(), cfg.OwnPorts, nat64.NewFinder(func(ctx context.Context) ([]netip.Addr, error) {
		addrs, _, err := cfg.Resolve(ctx, nat64.Name, family.IPv6, false)
		return addrs, err
	})}
}

// forbids returns a refusal if no connection may be made to the address and the port of to.
func (f *fence) forbids(ctx context.Context, to netip.AddrPort, within reach) error {
	addr, port := to.Addr().Unmap(), to.Port()
	plain := addr.WithZone("")
	if within == anywhere {
		return nil
	}
	for _, a := range append(f.embedded(ctx, plain), plain) {
		for prefix, name := range f.ranges {
			if prefix.Contains(a) {
				return refuse(ReasonAddress, "%s is %s", addr, name)
			}
		}
		if within == publicly && guard.IsPrivate(a) {
			return refuse(ReasonAddress, "%s is private, and the guard's policy has private: deny", addr)
		}
	}
	if slices.Contains(f.ownPorts, port) && listen.OfThisHost(plain) {
		return refuse(ReasonAddress, "%s port %d is this agent", addr, port)
	}
	return nil
}

// embedded returns the IPv4 addresses to which an IPv6 address may lead.
func (f *fence) embedded(ctx context.Context, addr netip.Addr) (all []netip.Addr) {
	if addr.Is4() {
		return nil
	}
	known := translations()
	prefixes, _ := f.nat64.Find(ctx)
	for _, prefix := range prefixes {
		known[prefix] = append(known[prefix], prefix.Bits()/8)
	}
	for prefix, places := range known {
		for _, at := range places {
			// No translator forwards to 0.0.0.0/8. An address at another place leaves zeros here.
			if v4 := nat64.Extract(addr, at); prefix.Contains(addr) && v4.As4()[0] != 0 {
				all = append(all, v4)
			}
		}
	}
	return all
}
