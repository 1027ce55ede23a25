package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/family"
)

// An addressRange is a range of addresses to which no connection is made.
type addressRange struct {
	prefix netip.Prefix
	name   string
}

// forbidden returns the ranges to which a name may not lead. The owner of a name chooses its addresses, so without
// these ranges a client could use the agent to reach services that only this host may reach. Private addresses (RFC
// 1918) are allowed, because many external hosts have such an address.
func forbidden() (ranges []addressRange) {
	for _, r := range [][2]string{
		{"0.0.0.0/8", "this host"},
		{"127.0.0.0/8", "loopback"},
		{"169.254.0.0/16", "link-local, and the metadata of clouds"},
		{"100.100.100.200/32", "the metadata of Alibaba Cloud"},
		{"168.63.129.16/32", "the metadata of Azure"},
		{"192.0.0.192/32", "the metadata of Oracle Cloud"},
		{"224.0.0.0/4", "multicast"},
		{"255.255.255.255/32", "broadcast"},
		{"::/127", "this host"},
		{"fe80::/10", "link-local"},
		{"fd00:ec2::/32", "the metadata of AWS"},
		{"fd20:ce::254/128", "the metadata of Google Cloud"},
		{"fd00:42::42/128", "the metadata of Scaleway"},
		{"fd00:c1::a9fe:a9fe/128", "the metadata of Oracle Cloud"},
		{"fd00:a9fe:a9fe::1/128", "the metadata of Akamai Cloud"},
		{"fd00:100::100:200/128", "the metadata of Alibaba Cloud"},
		{"ff00::/8", "multicast"},
	} {
		ranges = append(ranges, addressRange{netip.MustParsePrefix(r[0]), r[1]})
	}
	for _, prefix := range VIPs() {
		ranges = append(ranges, addressRange{prefix, "an automatic VIP"})
	}
	return ranges
}

// A translation is a prefix of IPv6 addresses that lead, through a translator or a tunnel, to the IPv4 address
// that they contain. offset is the index of the byte at which that address begins.
type translation struct {
	prefix netip.Prefix
	offset int
}

// translations returns the well-known translations (RFC 6052, section 2.1; RFC 3056, section 2; RFC 4291, section
// 2.5.5.1; RFC 2765, section 2.1). In addresses of the prefix for local translators (RFC 8215), operators choose
// where the IPv4 address begins; the list has the usual byte.
func translations() []translation {
	return []translation{
		{netip.MustParsePrefix("64:ff9b::/96"), 12}, {netip.MustParsePrefix("64:ff9b:1::/48"), 12}, {netip.MustParsePrefix("2002::/16"), 2},
		{netip.MustParsePrefix("::/96"), 12}, {netip.MustParsePrefix("::ffff:0:0:0/96"), 12},
	}
}

// embedded returns the IPv4 address that is contained in an IPv6 address and begins at the byte with the index offset.
// Byte 8 is no part of the IPv4 address (RFC 6052, section 2.2).
func embedded(a netip.Addr, offset int) netip.Addr {
	all, found := a.As16(), [4]byte{}
	for i := range found {
		if offset == 8 {
			offset++
		}
		found[i] = all[offset]
		offset++
	}
	return netip.AddrFrom4(found)
}

const (
	// nat64Name has IPv6 addresses only where a nameserver makes them for a NAT64 (RFC 7050).
	nat64Name = "ipv4only.arpa"
	// nat64Timeout is how long the lookup of nat64Name may take, and nat64Hold how long its result is kept at
	// least. The guard keeps the result because the forwarder does not cache every negative answer.
	nat64Timeout, nat64Hold = time.Second, time.Minute
)

// A guard refuses addresses to which no connection may be made. It is safe for concurrent use.
type guard struct {
	ranges   []addressRange
	ownPorts []uint16
	resolve  func(ctx context.Context, name string, f family.Family, onlyCached bool) ([]netip.Addr, bool, error)

	mu         sync.Mutex
	nat64      []translation // the translations of this network's NAT64
	nextLookup time.Time     // when nat64 is looked up again
}

// newGuard returns the guard of a server.
func newGuard(cfg *Config) *guard {
	return &guard{ranges: forbidden(), ownPorts: cfg.OwnPorts, resolve: cfg.Resolve}
}

// mayWait reports whether the method forbids may have to wait for nameservers.
func (g *guard) mayWait(addr netip.Addr) bool {
	if !addr.Unmap().Is6() {
		return false
	}
	if !g.mu.TryLock() { // another connection waits for nameservers
		return true
	}
	defer g.mu.Unlock()
	return time.Now().After(g.nextLookup)
}

// nat64Translations returns the translations of this network's NAT64.
func (g *guard) nat64Translations(ctx context.Context) []translation {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Now().After(g.nextLookup) {
		found, err := g.findNAT64(context.WithoutCancel(ctx)) // other connections wait for the result, too
		hold := nat64Timeout                                  // after a timeout, the previous result is used for this time
		if !errors.Is(err, context.DeadlineExceeded) {
			g.nat64, hold = found, nat64Hold
		}
		g.nextLookup = time.Now().Add(hold)
	}
	return g.nat64
}

// findNAT64 asks nameservers for the translations of this network's NAT64. Each IPv6 address of [nat64Name] contains
// one of two IPv4 addresses, at a place that follows from the length of the prefix.
func (g *guard) findNAT64(ctx context.Context) (found []translation, err error) {
	ctx, cancel := context.WithTimeout(ctx, nat64Timeout)
	defer cancel()
	addrs, _, err := g.resolve(ctx, nat64Name, family.IPv6, false)
	for _, addr := range addrs {
		for _, bits := range []int{32, 40, 48, 56, 64, 96} {
			v4 := embedded(addr, bits/8)
			if prefix, err := addr.Prefix(bits); err == nil && (v4 == netip.AddrFrom4([4]byte{192, 0, 0, 170}) || v4 == netip.AddrFrom4([4]byte{192, 0, 0, 171})) {
				found = append(found, translation{prefix, bits / 8})
			}
		}
	}
	return found, err
}

// forbids returns an error if no connection may be made to the address and the port of to.
func (g *guard) forbids(ctx context.Context, to netip.AddrPort) error {
	addr, port := to.Addr().Unmap(), to.Port()
	plain := addr.WithZone("")
	all := []netip.Addr{plain}
	if plain.Is6() {
		for _, t := range append(translations(), g.nat64Translations(ctx)...) {
			if t.prefix.Contains(plain) {
				all = append(all, embedded(plain, t.offset))
			}
		}
	}
	for _, a := range all {
		at := slices.IndexFunc(g.ranges, func(r addressRange) bool { return r.prefix.Contains(a) })
		if at >= 0 {
			return fmt.Errorf("%s is %s", addr, g.ranges[at].name)
		}
	}
	if slices.Contains(g.ownPorts, port) && ownAddress(plain) {
		return fmt.Errorf("%s port %d is this agent", addr, port)
	}
	return nil
}

// ownAddress reports whether addr is an address of this host now.
func ownAddress(addr netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // not known, so the address may be this host's
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && prefix.Addr().Unmap() == addr
	})
}
