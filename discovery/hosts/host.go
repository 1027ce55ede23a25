package hosts

import (
	"bytes"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/object"
)

// A Host has all claims to one host. It does not change, except that it remembers its entries.
type Host struct {
	Key     string // the host in lower case
	claims  []*claim
	slot    uint16 // of the automatic VIP
	hasSlot bool
	target  *Host  // if this host is an alias: the host whose addresses it has; nil for a host outside the mesh
	alias   string // the name that this host is an alias of; empty if it is no alias
	size    int    // of the addresses and destinations of the claims in a table, see sizer; without those of target

	variants atomic.Pointer[[]variant] // the entries that the host remembers; the slice is replaced, not changed
}

// Weight returns about how many bytes the host has, with its entries; 0 for nil.
func (h *Host) Weight() (n int) {
	const (
		perClaim     = 300 // a claim, and an entry without addresses
		perAddress   = 64  // an address in the claim, and in about two entries
		perNamespace = 32  // a namespace in an exportTo
	)
	for _, c := range h.allClaims() {
		n += perClaim + perAddress*(len(c.addrs)+len(c.literal)+len(c.vips)) + perNamespace*len(c.exportTo.Namespaces)
	}
	return n
}

// A sizer estimates how many bytes the claims to a host have in a table. If some of the host's addresses lack a port, the
// table has the addresses of each port.
type sizer struct {
	differ bool
	counts map[object.Ports]int // by list; there are few
}

func newSizer(claims []*claim) sizer {
	differ := slices.ContainsFunc(claims, func(c *claim) bool { return c.mixed != nil || c.ports != claims[0].ports })
	return sizer{differ: differ}
}

// count returns the number of ports in a list.
func (s *sizer) count(p object.Ports) int {
	count, known := s.counts[p]
	if !known {
		if s.counts == nil {
			s.counts = map[object.Ports]int{}
		}
		count = p.Len()
		s.counts[p] = count
	}
	return count
}

// size returns the size of a claim, without its names.
func (s *sizer) size(c *claim) int {
	n := c.destinations.Size() + sizeOf(c.literal) + sizeOf(c.vips)
	for i := range c.addrs {
		times := 1
		switch {
		case c.mixed != nil:
			times += s.count((*c.mixed)[i])
		case s.differ:
			times += s.count(c.ports)
		}
		n += times * sizeOf(c.addrs[i:i+1])
	}
	return n
}

// sizeInTables returns about how many bytes a host with these claims has in a table, without its names.
func sizeInTables(claims []*claim) (n int) {
	sizer := newSizer(claims)
	for _, c := range claims {
		n += sizer.size(c)
	}
	return n
}

// sizeOf returns about how many bytes addresses have in a table.
func sizeOf(addrs []netip.Addr) (n int) {
	const v4, v6 = 16, 40
	for _, a := range addrs {
		if a.Is4() {
			n += v4
		} else {
			n += v6
		}
	}
	return n
}

// lends returns the size of the host if it is the target of an alias and ServiceEntries of other namespaces than the
// alias's claim it, otherwise 0.
func (h *Host) lends(alias *Host) int {
	if h == nil || len(h.claims) == 0 || len(alias.claims) == 0 {
		return 0
	}
	// Claims are sorted by the kind of the object, then by namespace. All claims to the host of a Service are of its namespace.
	first, last, own := h.claims[0], h.claims[len(h.claims)-1], alias.claims[0].namespace
	if first.kubernetes() || last.kubernetes() || first.namespace == own && last.namespace == own {
		return 0
	}
	return h.size
}

// resolves returns 1 if the host has an address for some client, and 0 if it has none or is nil.
func (h *Host) resolves() int {
	if h == nil {
		return 0
	}
	for _, c := range h.claims {
		if c.addressed() || len(h.vipsOf(c)) > 0 {
			return 1
		}
	}
	return h.target.resolves()
}

// wantsVIP reports whether the host may have an automatic VIP. A host that is a Service, or that has
// an address from an object, needs none.
func (h *Host) wantsVIP() bool {
	for _, c := range h.claims {
		if c.addressed() || c.kubernetes() {
			return false
		}
	}
	return true
}

// vipsOf returns the automatic VIPs that the host has because of a claim, of both families.
func (h *Host) vipsOf(c *claim) []netip.Addr {
	switch {
	case !c.wantsVIP || !h.wantsVIP():
		return nil
	case len(c.vips) > 0:
		return c.vips
	case h.hasSlot:
		return []netip.Addr{slotAddr4(h.slot), slotAddr6(h.slot)}
	}
	return nil
}

// claimedAlias returns the name of which the host is an alias, as [Hosts.alias] does. Services of
// several clusters may have different aliases; the first claim that has an alias counts.
func (h *Host) claimedAlias() string {
	for _, c := range h.claims {
		if c.alias != "" {
			return c.alias
		}
	}
	return ""
}

// exportedTo yields the lists of namespaces in the exportTo of all claims (see allClaims). A list may come twice. Empty
// lists are left out.
func (h *Host) exportedTo(yield func([]string) bool) {
	for _, c := range h.allClaims() {
		if list := c.exportTo.Namespaces; len(list) > 0 && !yield(list) {
			return
		}
	}
}

// Namespace returns the namespace of the first object that claims the host; empty if there is none.
func (h *Host) Namespace() string {
	if len(h.claims) == 0 {
		return ""
	}
	return h.claims[0].namespace
}

// namespaces yields the namespaces of all claims (see allClaims). A namespace may come twice.
func (h *Host) namespaces(yield func(string) bool) {
	for _, c := range h.allClaims() {
		if !yield(c.namespace) {
			return
		}
	}
}

// allClaims returns the claims to the host, and the claims to the host that it is an alias of.
func (h *Host) allClaims() []*claim {
	switch {
	case h == nil:
		return nil
	case h.target == nil:
		return h.claims
	}
	return slices.Concat(h.claims, h.target.claims)
}

// maxVariants bounds the entries that a host remembers. There may be many: a Sidecar that is edited again and again may
// show other claims each time.
const maxVariants = 64

// variant returns the entry with a key. It calls build if the host does not remember the entry.
func (h *Host) variant(key variantKey, build func() *Entry) *Entry {
	for {
		known := h.variants.Load()
		if known != nil {
			for _, one := range *known {
				if one.key == key {
					return one.entry
				}
			}
		}
		entry, next := build(), []variant(nil)
		if known != nil {
			entry, next = reuse(entry, *known), slices.Clip(*known)
		}
		if len(next) >= maxVariants {
			next = nil
		}
		if next = append(next, variant{key, entry}); h.variants.CompareAndSwap(known, &next) {
			return entry
		}
	}
}

// reuse returns an entry in known with the same content as entry, or entry itself if there is none.
func reuse(entry *Entry, known []variant) *Entry {
	for _, known := range known {
		if entry != nil && known.entry != nil && bytes.Equal(known.entry.Encoded, entry.Encoded) {
			return known.entry
		}
	}
	return entry
}

// A variant is an entry of a host, with its key.
type variant struct {
	key   variantKey
	entry *Entry
}

// variantKey is everything that determines the entry of a host. Views with the same key share the entry.
type variantKey struct {
	visible  uint64 // which of the first maxBits claims are visible, a bit each
	others   string // the same for further claims, eight to a byte
	families Families
	vips     bool
	near     nearCluster
	target   digest.Sum // of the entry of the target
}

// setVisible sets the claims that are visible.
func (k *variantKey) setVisible(s *claimSet) { k.visible, k.others = s.first, string(s.others) }

// nearCluster is the cluster whose endpoints come first, if set.
type nearCluster struct {
	id  clusterID
	set bool
}

// contains reports whether a claim has endpoints in the cluster, so that its addresses come first.
func (n nearCluster) contains(c *claim) bool { return n.set && c.endpoints && c.cluster == n.id }

// maxBits is how many claims a claimSet holds without an allocation. Nearly all hosts have no more.
const maxBits = 64

// A claimSet is a set of the claims of a host, by number.
type claimSet struct {
	first  uint64
	others []byte
}

// add adds the claim with the number i to the set. The host has count claims.
func (s *claimSet) add(i, count int) {
	if i < maxBits {
		s.first |= 1 << i
		return
	}
	if s.others == nil {
		s.others = make([]byte, (count-maxBits+7)/8)
	}
	i -= maxBits
	s.others[i/8] |= 1 << (i % 8)
}

// A HostChange is a host before and after a change. Old is nil if the host is new; New is nil if the host was removed.
type HostChange struct {
	Old, New *Host
}

// Key returns the key of the host.
func (c HostChange) Key() string {
	if c.New != nil {
		return c.New.Key
	}
	return c.Old.Key
}
