package table

import (
	"bytes"
	"iter"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// addresses are the addresses of a host or of a port. The near addresses are those in the agent's cluster, which come
// first in answers. If all addresses are near, there is nothing to put first, so they are stored as if none were near.
type addresses struct {
	V4, V6 []byte    // packed addresses without duplicates: first the near ones, then the others, both sorted
	near   [2]uint32 // how many of V4, and how many of V6, are stored as near
}

// Near returns the packed addresses of the family of rrtype in two parts: the addresses in the agent's cluster, and
// the others. If all addresses of the host are in the agent's cluster, they are all in the second part.
func (a *addresses) Near(rrtype uint16) (near, others []byte) {
	all, n := a.V4, a.near[0]
	if rrtype == dns.TypeAAAA {
		all, n = a.V6, a.near[1]
	}
	split := int(n) * wire.AddressLen(rrtype)
	return all[:split], all[split:]
}

// allNear reports whether all addresses are stored as near.
func (a *addresses) allNear() bool {
	_, others4 := a.Near(dns.TypeA)
	_, others6 := a.Near(dns.TypeAAAA)
	return len(others4)+len(others6) == 0
}

// all yields the near addresses, and then the others. In both parts, IPv4 addresses come first.
func (a *addresses) all() iter.Seq[netip.Addr] {
	near4, others4 := a.Near(dns.TypeA)
	near6, others6 := a.Near(dns.TypeAAAA)
	return func(yield func(netip.Addr) bool) {
		for _, list := range [...]struct {
			rrtype uint16
			packed []byte
		}{{dns.TypeA, near4}, {dns.TypeAAAA, near6}, {dns.TypeA, others4}, {dns.TypeAAAA, others6}} {
			for packed := range slices.Chunk(list.packed, wire.AddressLen(list.rrtype)) {
				if addr, _ := netip.AddrFromSlice(packed); !yield(addr) {
					return
				}
			}
		}
	}
}

// has reports whether a packed address is one of the addresses.
func (a *addresses) has(packed []byte) bool { return a.find(packed) != nil }

// find returns the address that equals packed, or nil if there is none. The result is in the memory of V4 or V6.
func (a *addresses) find(packed []byte) []byte {
	rrtype := dns.TypeA
	if len(packed) == wire.AddressLen(dns.TypeAAAA) {
		rrtype = dns.TypeAAAA
	}
	near, others := a.Near(rrtype)
	if found := findPacked(near, packed); found != nil {
		return found
	}
	return findPacked(others, packed)
}

// findPacked returns the address in list that equals packed, or nil if there is none. list has packed addresses of
// the same family, and must be sorted.
func findPacked(list, packed []byte) []byte {
	size := len(packed)
	low, high := 0, len(list)/size
	for low < high {
		middle := (low + high) / 2
		one := list[middle*size:][:size:size]
		switch order := bytes.Compare(one, packed); {
		case order == 0:
			return one
		case order < 0:
			low = middle + 1
		default:
			high = middle
		}
	}
	return nil
}
