package table

import (
	"bytes"
	"iter"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Near returns the packed addresses of the family of rrtype in two parts: the addresses in the
// agent's cluster, and the others. Without that difference, the first part is empty.
func (h *Host) Near(rrtype uint16) (near, others []byte) {
	all, n := h.V4, h.near[0]
	if rrtype == dns.TypeAAAA {
		all, n = h.V6, h.near[1]
	}
	at := int(n) * wire.AddressLen(rrtype)
	return all[:at], all[at:]
}

// alike reports whether all addresses are near.
func (h *Host) alike() bool {
	_, others4 := h.Near(dns.TypeA)
	_, others6 := h.Near(dns.TypeAAAA)
	return len(others4)+len(others6) == 0
}

// addresses yields the addresses of both families, near ones first, and of these IPv4.
func (h *Host) addresses() iter.Seq[netip.Addr] {
	near4, others4 := h.Near(dns.TypeA)
	near6, others6 := h.Near(dns.TypeAAAA)
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

// has reports whether the host has a packed address.
func (h *Host) has(packed []byte) bool { return h.find(packed) != nil }

// find returns the host's own copy of a packed address, or nil if the host does not have it.
func (h *Host) find(packed []byte) []byte {
	rrtype := dns.TypeA
	if len(packed) == wire.AddressLen(dns.TypeAAAA) {
		rrtype = dns.TypeAAAA
	}
	near, others := h.Near(rrtype)
	if found := findPacked(near, packed); found != nil {
		return found
	}
	return findPacked(others, packed)
}

// findPacked returns the copy of a packed address in a sorted list of packed addresses of its
// family, or nil. It takes a logarithm of the list's length.
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
