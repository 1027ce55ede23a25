package table

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A reverseIndex finds the hosts of an address, and the pods of a headless Service that have it. Its
// parts hold sorted pointers, by the hash of the address, or of the address and the Service. They are
// immutable, so tables share them.
type reverseIndex [partCount][]pointer

// partCount is the number of parts of an index by something other than hosts.
const (
	partBits  = 8
	partCount = 1 << partBits
)

// partOf returns the part of a hash.
func partOf(hash uint64) int { return int(hash >> (64 - partBits)) } //nolint:gosec // eight bits

// A pointer refers from an address, or an address and a Service, to a host. From high to low bits it
// consists of a tag of these, a bit that is set unless the host is a Service or a part of one, the shard
// of the host, and the low half of the hash of the host's name. Hashes collide, so the host's record has
// to be compared.
type pointer uint64

const (
	pointerNameBits     = 32
	pointerShardBits    = 8
	pointerExternal     = 1 << (pointerNameBits + pointerShardBits)
	pointerTagShift     = pointerNameBits + pointerShardBits + 1
	maxPointers         = 64 // names in one answer
	maxPointersLookedAt = 256
)

// A target is a host as pointers refer to it: its shard, and the hash of its name.
type target struct {
	shard int
	name  uint64
}

// newPointer returns the pointer from a key to a host and the part of the index that holds it, given
// the hash of the key.
func newPointer(key uint64, to target, external bool) (at int, p pointer) {
	p = keyTag(key) | pointer(to.shard)<<pointerNameBits | pointer(uint32(to.name)) //nolint:gosec // the low half
	if external {
		p |= pointerExternal
	}
	return partOf(key), p
}

// keyTag returns the tag of a key: the bits of its hash below the bits that choose the part.
func keyTag(key uint64) pointer {
	return pointer(key << partBits >> pointerTagShift << pointerTagShift)
}

// podKey returns the hash by which the index has the pods of a Service with a packed address.
func podKey(seed maphash.Seed, service wire.Name, packed []byte) uint64 {
	var key [16 + wire.MaxNameLen]byte
	n := copy(key[:], packed)
	n += copy(key[n:], service)
	return maphash.Bytes(seed, key[:n])
}

// pointers returns FQDNs of hosts that have a packed address, sorted as text: of all, or of
// maxPointers if they are more, Services before other hosts. The result is stored in s. A headless
// Service stands for the endpoint with this address, whose name is a pod's or, if no pod has the
// address, a label with the address before the name of the Service. Services of the cluster domain
// and others, such as ServiceImports, may both have the address: the pods of one side do not count
// for the other.
func (t *Table) pointers(packed []byte, s *Scratch) []wire.Name {
	s.ptr, s.services, s.dashed = s.ptr[:0], s.services[:0], s.dashed[:0]
	n := 0
	t.having(packed, func(h Host) bool {
		switch {
		case h.wildcard(): // no FQDN of it could be a PTR record's target
		case h.headless():
			s.services = append(s.services, h.Name)
		default:
			s.ptr = append(s.ptr, h.Name)
		}
		n++
		return len(s.services)+len(s.ptr) < maxPointers && n < maxPointersLookedAt
	})
	var havePods [2]bool // outside and below the cluster domain
	for _, service := range s.services {
		t.pods(service, packed, func(pod Host) bool {
			havePods[t.side(service)] = true
			s.ptr = append(s.ptr, pod.Name)
			return len(s.ptr) < maxPointers
		})
	}
	for _, service := range s.services {
		if havePods[t.side(service)] {
			continue
		}
		start := len(s.dashed)
		if s.dashed = append(appendDashed(s.dashed, packed), service...); len(s.dashed)-start <= wire.MaxNameLen {
			s.ptr = append(s.ptr, wire.Name(viewString(s.dashed[start:])))
		}
	}
	slices.SortFunc(s.ptr, wire.Name.CompareText)
	s.ptr = slices.Compact(s.ptr)
	s.ptr = s.ptr[:min(len(s.ptr), maxPointers)]
	return s.ptr
}

// side returns 1 for a name below the cluster domain, otherwise 0.
func (t *Table) side(name wire.Name) int {
	if name.Below(t.Cluster.Domain) {
		return 1
	}
	return 0
}

// HostsAt calls yield for the hosts with an address, wildcards included and aliases not.
func (t *Table) HostsAt(addr netip.Addr, yield func(Host)) {
	each := func(h Host) bool {
		yield(h)
		return true
	}
	if addr = addr.Unmap(); addr.Is4() {
		packed := addr.As4()
		t.having(packed[:], each)
		return
	}
	packed := addr.As16()
	t.having(packed[:], each)
}

// having calls yield for the hosts with a packed address, Services first, until it returns false.
func (t *Table) having(packed []byte, yield func(Host) bool) {
	t.pointed(maphash.Bytes(t.seed, packed), packed, yield)
}

// pods calls yield for the pods of a headless Service with a packed address until it returns false.
func (t *Table) pods(service wire.Name, packed []byte, yield func(Host) bool) {
	t.pointed(podKey(t.seed, service, packed), packed, func(h Host) bool { return !h.podOf(service) || yield(h) })
}

// pointed calls yield for the hosts with a packed address to which the index points from a key.
func (t *Table) pointed(key uint64, packed []byte, yield func(Host) bool) {
	tag := keyTag(key)
	all := t.reverse[partOf(key)]
	first, _ := slices.BinarySearch(all, tag)
	for _, p := range all[first:] {
		if p>>pointerTagShift != tag>>pointerTagShift {
			break
		}
		at := &t.shards[p>>pointerNameBits&(digest.Count-1)]
		if !at.having(packed, t.seed, uint32(p), yield) { //nolint:gosec // the low half
			break
		}
	}
}

// having calls yield for the hosts that have a packed address and whose names' hashes have the low half
// low, until it returns false; it then returns false, too.
func (s *shard) having(packed []byte, seed maphash.Seed, low uint32, yield func(Host) bool) bool {
	if len(s.index) == 0 {
		return true
	}
	mask := uint32(len(s.index) - 1) //nolint:gosec // a shard is shorter
	for i := low & mask; s.index[i] != 0; i = (i + 1) & mask {
		h := viewHost(s.records[s.index[i]-1:])
		if uint32(maphash.String(seed, string(h.Name))) == low && h.has(packed) && !yield(h) { //nolint:gosec // the low half
			return false
		}
	}
	return true
}

// next returns the index of the table after, which differs from before in the shards that
// changed lists.
func (r reverseIndex) next(before, after *Table, changed []int) reverseIndex {
	var removed, added [partCount][]pointer
	var was, is []addressed
	for _, i := range changed {
		was = before.shards[i].pointers(was[:0], before, i)
		is = after.shards[i].pointers(is[:0], after, i)
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

// An addressed pointer is a pointer with the part of the index that holds it.
type addressed struct {
	at int
	p  pointer
}

func (a addressed) compare(b addressed) int {
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.p, b.p))
}

// pointers appends to dst the pointers to the hosts of s, the shard of t with a number, sorted and without
// duplicates. Aliases have none, because a PTR record's target must not be an alias (RFC 2181,
// section 10.2).
func (s *shard) pointers(dst []addressed, t *Table, number int) []addressed {
	for h := range s.all {
		if h.isAlias() {
			continue
		}
		to := target{number, maphash.String(t.seed, string(h.Name))}
		add := func(key uint64) {
			at, p := newPointer(key, to, !h.Kubernetes())
			dst = append(dst, addressed{at, p})
		}
		var services [2]wire.Name
		if h.mayBePod(&t.Cluster) {
			services[0], services[1] = h.servicesOfPod()
		}
		each := func(packed []byte, size int) {
			for one := range slices.Chunk(packed, size) {
				add(maphash.Bytes(t.seed, one))
				for _, service := range services {
					if service != wire.Root {
						add(podKey(t.seed, service, one))
					}
				}
			}
		}
		each(h.V4, wire.AddressLen(dns.TypeA))
		each(h.V6, wire.AddressLen(dns.TypeAAAA))
	}
	slices.SortFunc(dst, addressed.compare)
	return slices.Compact(dst)
}

// subtract adds to dst the pointers of list that are not in excluded; both are sorted.
func subtract(dst *[partCount][]pointer, list, excluded []addressed) {
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

// Pointer finds the hosts whose address has the PTR name, except hosts whose names
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
