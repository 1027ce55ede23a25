package dnsproxy

import (
	"cmp"
	"hash/maphash"
	"slices"

	"github.com/nametap/nametap/dnsproxy/wire"

	"github.com/miekg/dns"
)

// A reverseIndex finds the hosts of an address: pointers by the hash of the address,
// each shard sorted. Shards never change, so tables share them.
type reverseIndex [shardCount][]pointer

// A pointer leads from an address to a host: from high to low bits a tag of the
// address, the shard of the host, and the low half of the hash of its name. It may
// lead to the wrong host, or to none; whether a host has the address is for its record
// to say.
type pointer uint64

const (
	pointerNameBits = 32
	pointerTagShift = pointerNameBits + shardBits
)

// newPointer returns the pointer from an address to a host, and the shard that it
// belongs in, by the hashes of the address and of the name.
func newPointer(address, name uint64) (at int, p pointer) {
	return shardOf(address), addressTag(address) |
		pointer(shardOf(name))<<pointerNameBits | pointer(uint32(name)) //nolint:gosec // the low half
}

// addressTag is the part of a pointer that is of the address: the bits below those
// that choose the shard.
func addressTag(address uint64) pointer {
	return pointer(address << shardBits >> pointerTagShift << pointerTagShift)
}

// pointers finds the FQDNs of the hosts that have a packed address, sorted as text.
// The result is in s.
func (t *Table) pointers(packed []byte, s *scratch) []wire.Name {
	hash := maphash.Bytes(t.seed, packed)
	tag := addressTag(hash)
	all := t.reverse[shardOf(hash)]
	first, _ := slices.BinarySearch(all, tag)
	s.ptr = s.ptr[:0]
	for _, p := range all[first:] {
		if p>>pointerTagShift != tag>>pointerTagShift {
			break
		}
		at := &t.shards[p>>pointerNameBits&(shardCount-1)]
		s.ptr = at.appendPointed(s.ptr, t.seed, uint32(p), packed) //nolint:gosec // the low half
	}
	slices.SortFunc(s.ptr, wire.Name.CompareText)
	s.ptr = slices.Compact(s.ptr)
	return s.ptr
}

// appendPointed appends the names of the hosts with the low half of a name's hash
// that have a packed address.
func (s *shard) appendPointed(dst []wire.Name, seed maphash.Seed, low uint32, packed []byte) []wire.Name {
	if len(s.index) == 0 {
		return dst
	}
	mask := uint32(len(s.index) - 1) //nolint:gosec // a shard is shorter
	for i := low & mask; s.index[i] != 0; i = (i + 1) & mask {
		h := viewHost(s.records[s.index[i]-1:])
		if uint32(maphash.String(seed, string(h.name))) == low && h.has(packed) { //nolint:gosec // the low half
			dst = append(dst, h.name)
		}
	}
	return dst
}

// next returns the index of after, which differs from before in the shards that
// changed.
func (r reverseIndex) next(before, after *Table, changed []int) reverseIndex {
	var gone, come [shardCount][]pointer
	var was, is []addressed
	for _, i := range changed {
		was = before.shards[i].pointers(was[:0], before.seed)
		is = after.shards[i].pointers(is[:0], after.seed)
		subtract(&gone, was, is)
		subtract(&come, is, was)
	}
	for i := range r {
		if len(gone[i])+len(come[i]) > 0 {
			slices.Sort(gone[i])
			slices.Sort(come[i])
			r[i] = merge(r[i], gone[i], come[i])
		}
	}
	return r
}

// An addressed pointer is a pointer and the shard of the index that it belongs in.
type addressed struct {
	at int
	p  pointer
}

func (a addressed) compare(b addressed) int {
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.p, b.p))
}

// pointers appends the pointers to the hosts of a shard to dst, sorted and without
// duplicates. A wildcard has no FQDN that a PTR record could name.
func (s *shard) pointers(dst []addressed, seed maphash.Seed) []addressed {
	for h := range s.all {
		if h.wildcard() {
			continue
		}
		name := maphash.String(seed, string(h.name))
		add := func(packed []byte, size int) {
			for ; len(packed) > 0; packed = packed[size:] {
				at, p := newPointer(maphash.Bytes(seed, packed[:size]), name)
				dst = append(dst, addressed{at, p})
			}
		}
		add(h.v4, addressLen(dns.TypeA))
		add(h.v6, addressLen(dns.TypeAAAA))
	}
	slices.SortFunc(dst, addressed.compare)
	return slices.Compact(dst)
}

// subtract appends to dst the pointers of one sorted list that are not in another.
func subtract(dst *[shardCount][]pointer, from, what []addressed) {
	for _, a := range from {
		for len(what) > 0 && what[0].compare(a) < 0 {
			what = what[1:]
		}
		if len(what) == 0 || what[0] != a {
			dst[a.at] = append(dst[a.at], a.p)
		}
	}
}

// merge returns all without gone and with come; all of them are sorted and without
// duplicates.
func merge(all, gone, come []pointer) []pointer {
	merged := make([]pointer, 0, len(all)-len(gone)+len(come))
	for _, p := range all {
		if len(gone) > 0 && gone[0] == p {
			gone = gone[1:]
			continue
		}
		for len(come) > 0 && come[0] < p {
			merged = append(merged, come[0])
			come = come[1:]
		}
		merged = append(merged, p)
	}
	return append(merged, come...)
}

// pointer finds the hosts of the address that name is the PTR name of, but for those
// that settings leave to nameservers.
func (t *Table) pointer(name wire.Name, settings *suffixRules, s *scratch) match {
	addr, ok := wire.ReverseAddr(name)
	if !ok {
		return match{rule: RuleNone}
	}
	var names []wire.Name
	if addr = addr.Unmap(); addr.Is4() {
		packed := addr.As4()
		names = t.pointers(packed[:], s)
	} else {
		packed := addr.As16()
		names = t.pointers(packed[:], s)
	}
	known := len(names) > 0
	names = settings.withoutBypassed(names)
	if len(names) == 0 {
		return match{rule: RuleNone, bypassed: known}
	}
	return match{rule: RulePTR, ptr: names}
}
