package table

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A reverseIndex finds the hosts of an address. Its shards hold sorted pointers, by the hash
// of the address. They are immutable, so tables share them.
type reverseIndex [shardCount][]pointer

// A pointer refers from an address to a host. From high to low bits it consists of a tag of
// the address, the shard of the host, and the low half of the hash of the host's name.
// Hashes collide, so the host's record has to be compared with the address.
type pointer uint64

const (
	pointerNameBits = 32
	pointerTagShift = pointerNameBits + shardBits
)

// newPointer returns the pointer from an address to a host and the shard of the index that
// holds it, given the hashes of the address and of the host's name.
func newPointer(address, name uint64) (at int, p pointer) {
	return shardOf(address), addressTag(address) |
		pointer(shardOf(name))<<pointerNameBits | pointer(uint32(name)) //nolint:gosec // the low half
}

// addressTag returns the tag of an address: the bits of its hash below those that choose
// the shard.
func addressTag(address uint64) pointer {
	return pointer(address << shardBits >> pointerTagShift << pointerTagShift)
}

// pointers returns the FQDNs, sorted as text, of the hosts that have a packed address. The
// result is stored in s. A headless Service stands for the endpoint with this address, whose
// name is that of a pod or, if no pod has the address, a label with the address before the
// name of the Service. Services of the cluster domain and others, such as ServiceImports, may both
// have the address: the pods of one side do not count for the other.
func (t *Table) pointers(packed []byte, s *Scratch) []wire.Name {
	s.ptr, s.services, s.dashed = s.ptr[:0], s.services[:0], s.dashed[:0]
	t.having(packed, func(h Host) {
		if h.wildcard() { // no FQDN of it could be a PTR record's target
			return
		}
		if h.headless() {
			s.services = append(s.services, h.Name)
		} else {
			s.ptr = append(s.ptr, h.Name)
		}
	})
	for _, service := range s.services {
		local := service.Below(t.Cluster.Domain)
		if slices.ContainsFunc(s.services, func(other wire.Name) bool { return other.Below(t.Cluster.Domain) == local && t.hasPod(other, packed) }) {
			continue
		}
		start := len(s.dashed)
		if s.dashed = append(appendDashed(s.dashed, packed), service...); len(s.dashed)-start <= wire.MaxNameLen {
			s.ptr = append(s.ptr, wire.Name(viewString(s.dashed[start:])))
		}
	}
	slices.SortFunc(s.ptr, wire.Name.CompareText)
	s.ptr = slices.Compact(s.ptr)
	return s.ptr
}

// HostsAt calls yield for the hosts with an address, wildcards included and aliases not.
func (t *Table) HostsAt(addr netip.Addr, yield func(Host)) {
	if addr = addr.Unmap(); addr.Is4() {
		packed := addr.As4()
		t.having(packed[:], yield)
		return
	}
	packed := addr.As16()
	t.having(packed[:], yield)
}

// having calls yield for the hosts with a packed address.
func (t *Table) having(packed []byte, yield func(Host)) {
	hash := maphash.Bytes(t.seed, packed)
	tag := addressTag(hash)
	all := t.reverse[shardOf(hash)]
	first, _ := slices.BinarySearch(all, tag)
	for _, p := range all[first:] {
		if p>>pointerTagShift != tag>>pointerTagShift {
			break
		}
		at := &t.shards[p>>pointerNameBits&(shardCount-1)]
		at.having(packed, t.seed, uint32(p), yield) //nolint:gosec // the low half
	}
}

// having calls yield for the hosts that have a packed address and whose names' hashes have the
// low half low.
func (s *shard) having(packed []byte, seed maphash.Seed, low uint32, yield func(Host)) {
	if len(s.index) == 0 {
		return
	}
	mask := uint32(len(s.index) - 1) //nolint:gosec // a shard is shorter
	for i := low & mask; s.index[i] != 0; i = (i + 1) & mask {
		h := viewHost(s.records[s.index[i]-1:])
		if uint32(maphash.String(seed, string(h.Name))) == low && h.has(packed) { //nolint:gosec // the low half
			yield(h)
		}
	}
}

// next returns the index of the table after, which differs from before in the shards that
// changed lists.
func (r reverseIndex) next(before, after *Table, changed []int) reverseIndex {
	var removed, added [shardCount][]pointer
	var was, is []addressed
	for _, i := range changed {
		was = before.shards[i].pointers(was[:0], before.seed)
		is = after.shards[i].pointers(is[:0], after.seed)
		subtract(&removed, was, is)
		subtract(&added, is, was)
	}
	for i := range r {
		if len(removed[i])+len(added[i]) > 0 {
			slices.Sort(removed[i])
			slices.Sort(added[i])
			r[i] = merge(r[i], removed[i], added[i])
		}
	}
	return r
}

// An addressed pointer is a pointer with the shard of the index that holds it.
type addressed struct {
	at int
	p  pointer
}

func (a addressed) compare(b addressed) int {
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.p, b.p))
}

// pointers appends to dst the pointers to the hosts of a shard, sorted and without
// duplicates. Aliases have none, because a PTR record's target must not be an alias (RFC 2181,
// section 10.2).
func (s *shard) pointers(dst []addressed, seed maphash.Seed) []addressed {
	for h := range s.all {
		if h.isAlias() {
			continue
		}
		name := maphash.String(seed, string(h.Name))
		add := func(packed []byte, size int) {
			for ; len(packed) > 0; packed = packed[size:] {
				at, p := newPointer(maphash.Bytes(seed, packed[:size]), name)
				dst = append(dst, addressed{at, p})
			}
		}
		add(h.V4, wire.AddressLen(dns.TypeA))
		add(h.V6, wire.AddressLen(dns.TypeAAAA))
	}
	slices.SortFunc(dst, addressed.compare)
	return slices.Compact(dst)
}

// subtract adds to dst the pointers of list that are not in excluded; both are sorted.
func subtract(dst *[shardCount][]pointer, list, excluded []addressed) {
	for _, a := range list {
		for len(excluded) > 0 && excluded[0].compare(a) < 0 {
			excluded = excluded[1:]
		}
		if len(excluded) == 0 || excluded[0] != a {
			dst[a.at] = append(dst[a.at], a.p)
		}
	}
}

// merge returns all without removed and with added. All lists are sorted and without
// duplicates.
func merge(all, removed, added []pointer) []pointer {
	merged := make([]pointer, 0, len(all)-len(removed)+len(added))
	for _, p := range all {
		if len(removed) > 0 && removed[0] == p {
			removed = removed[1:]
			continue
		}
		for len(added) > 0 && added[0] < p {
			merged = append(merged, added[0])
			added = added[1:]
		}
		merged = append(merged, p)
	}
	return append(merged, added...)
}

// Pointer finds the hosts whose address name is the PTR name of, without those that
// suffixes give to nameservers.
func (t *Table) Pointer(name wire.Name, suffixes *Suffixes, s *Scratch) Match {
	addr, ok := wire.ReverseAddr(name)
	if !ok {
		return Match{Rule: RuleNone}
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
	names = suffixes.withoutBypassed(names)
	if len(names) == 0 {
		return Match{Rule: RuleNone, Bypassed: known}
	}
	return Match{Rule: RulePTR, Pointers: names}
}
