package table

import (
	"cmp"
	"hash/maphash"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A reverseIndex finds the hosts that have an address, and the pods of a headless Service that have an
// address. A key of the index is an address, or an address together with a Service. The index is divided into parts,
// and the hash of a key chooses its part. Each part is a sorted list of pointers. Parts are immutable, so tables share
// them.
type reverseIndex [partCount][]pointer

// update returns the index of hosts. r must be the index of previous, and hosts may differ from previous only in the
// shards whose numbers are in changed.
func (r reverseIndex) update(previous, hosts *hostSet, changed []int) reverseIndex {
	var removed, added [partCount][]pointer
	var oldPointers, newPointers []partPointer
	for _, i := range changed {
		oldPointers = appendPointers(oldPointers[:0], previous, i)
		newPointers = appendPointers(newPointers[:0], hosts, i)
		subtract(&removed, oldPointers, newPointers)
		subtract(&added, newPointers, oldPointers)
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

// A pointer leads from a key to a host. Its bits are, from high to low: a tag of the key; a bit that is set if the host
// is not of the registry Kubernetes; the shard of the host; the low half of the hash of the host's name. Hashes may
// collide, so a lookup must check the host's record.
type pointer uint64

const (
	pointerNameBits     = 32
	pointerShardBits    = 9
	pointerExternal     = 1 << (pointerNameBits + pointerShardBits)
	pointerTagShift     = pointerNameBits + pointerShardBits + 1
	maxPointers         = 64  // how many names an answer has at most
	maxPointersLookedAt = 256 // how many hosts are looked at for an answer at most
)

// keyTag returns the tag of the key with this hash. The highest bits of the hash choose the part, and the bits below
// them are the tag.
func keyTag(key uint64) pointer {
	return pointer(key << partBits >> pointerTagShift << pointerTagShift)
}

// podKey returns the hash of a key for pods. The key consists of a Service and a packed address of its pods.
func podKey(seed maphash.Seed, service wire.Name, packed []byte) uint64 {
	var key [16 + wire.MaxNameLen]byte
	n := copy(key[:], packed)
	n += copy(key[n:], service)
	return maphash.Bytes(seed, key[:n])
}

// A partPointer is a pointer, and the index of its part.
type partPointer struct {
	part int
	p    pointer
}

func (a partPointer) compare(b partPointer) int {
	return cmp.Or(cmp.Compare(a.part, b.part), cmp.Compare(a.p, b.p))
}

// appendPointers appends to dst the pointers to the hosts of a shard, sorted and without duplicates. Aliases have no
// pointers, because a PTR record's target must not be an alias (RFC 2181, section 10.2).
func appendPointers(dst []partPointer, hosts *hostSet, number int) []partPointer {
	for h := range hosts.shards[number].all {
		if h.isAlias() {
			continue
		}
		name := uint32(maphash.String(hosts.seed, string(h.Name))) //nolint:gosec // the low half
		host := pointer(number)<<pointerNameBits | pointer(name)
		if !h.Kubernetes() {
			host |= pointerExternal
		}
		add := func(key uint64) { dst = append(dst, partPointer{partOf(key), keyTag(key) | host}) }
		var services [2]wire.Name
		if h.mayBePod(&hosts.Cluster) {
			services[0], services[1] = h.servicesOfPod()
		}
		addAll := func(packed []byte, size int) {
			for one := range slices.Chunk(packed, size) {
				add(maphash.Bytes(hosts.seed, one))
				for _, service := range services {
					if service != wire.Root {
						add(podKey(hosts.seed, service, one))
					}
				}
			}
		}
		addAll(h.V4, wire.AddressLen(dns.TypeA))
		addAll(h.V6, wire.AddressLen(dns.TypeAAAA))
	}
	slices.SortFunc(dst, partPointer.compare)
	return slices.Compact(dst)
}

// subtract adds to dst the pointers of list that are not in excluded. Both lists must be sorted.
func subtract(dst *[partCount][]pointer, list, excluded []partPointer) {
	for _, a := range list {
		for len(excluded) > 0 && excluded[0].compare(a) < 0 {
			excluded = excluded[1:]
		}
		if len(excluded) == 0 || excluded[0] != a {
			dst[a.part] = append(dst[a.part], a.p)
		}
	}
}

// merge returns the list all without the pointers of the list removed, and with the pointers of the list added. The
// three lists must be sorted and without duplicates.
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
