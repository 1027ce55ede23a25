package hosts

import (
	"bytes"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/nametap/nametap/api/digest"
)

// Families are the address families of a client.
type Families struct{ V4, V6 bool }

func (f Families) has(a netip.Addr) bool {
	if a.Is4() {
		return f.V4
	}
	return f.V6
}

// A View is everything that determines which entries a client sees.
type View struct {
	Namespace string
	Families  Families
	VIPs      bool  // the client has a proxy for connections to automatic VIPs
	Sidecar   Limit // the Sidecar that limits the hosts
	Place     Place // where the client is, from [Scene.Place]
}

// A Base is everything that determines what a viewer sees, except for hosts that its namespace sees in another
// way than others do.
type Base struct {
	Families Families
	VIPs     bool
	Sidecar  Limit
	Place    Place
	// all and own say which hosts without an exportTo are visible: all hosts, or the hosts of the
	// namespace.
	all, own bool
}

// A Viewer looks at hosts through a view. It is valid until an update has Views set. It is safe for concurrent
// use.
type Viewer struct {
	Base
	Namespace string
	around    *surroundings // nil with one cluster
}

// AtBase returns a viewer that sees what all views with its base see. Others see the hosts of [Set.Special] in
// another way, and no others.
func (v *Viewer) AtBase() Viewer { return Viewer{Base: v.Base, around: v.around} }

// SeesOwn reports whether the viewer may see hosts of its own namespace that other namespaces do not see, although
// no exportTo names it.
func (v *Viewer) SeesOwn() bool {
	return v.own && !v.all || v.Sidecar.is != nil && v.Sidecar.is.egress.FromOwn()
}

// sees reports whether the view shows what a claim says.
func (v *Viewer) sees(c *claim) bool {
	return v.isExported(c) && (v.Sidecar.is == nil || v.Sidecar.is.egress.Shows(v.Namespace, c.namespace, c.owner()))
}

// isExported reports whether the namespace of the view may see what a claim says.
func (v *Viewer) isExported(c *claim) bool {
	if c.exportTo.IsDefault() {
		return v.all || v.own && c.namespace == v.Namespace
	}
	return c.exportTo.VisibleIn(v.Namespace)
}

// A Host has all claims to one host. It does not change, except that it remembers its entries.
type Host struct {
	Key     string // the host in lower case
	claims  []*claim
	slot    uint16 // of the automatic VIP
	hasSlot bool
	target  *Host  // whose addresses this one has; nil if this is no alias, or target is no mesh host
	alias   string // the name of target

	variants atomic.Pointer[[]variant] // the entries that were made; a new one replaces the slice
}

// A variant is an entry of a host, and what decides about it.
type variant struct {
	key   variantKey
	entry *Entry
}

// variantKey is everything that determines the entry of a host. Views with the same one share it.
type variantKey struct {
	visible  uint64 // claims, a bit each: the first maxBits
	others   string // the same for further ones, eight to a byte
	families Families
	vips     bool
	near     nearCluster
	target   digest.Sum // of the entry of the target
}

// maxBits is how many claims most hosts have at most.
const maxBits = 64

// A claimSet is a set of the claims of a host, by number.
type claimSet struct {
	first  uint64
	others []byte
}

// add adds a claim of a host with a number of claims.
func (s *claimSet) add(i, of int) {
	if i < maxBits {
		s.first |= 1 << i
		return
	}
	if s.others == nil {
		s.others = make([]byte, (of-maxBits+7)/8)
	}
	i -= maxBits
	s.others[i/8] |= 1 << (i % 8)
}

// setVisible sets the claims that are visible.
func (k *variantKey) setVisible(s *claimSet) { k.visible, k.others = s.first, string(s.others) }

// Weight returns about how many bytes the host has, with its entries; 0 for nil.
func (h *Host) Weight() (n int) {
	const (
		each      = 300 // of a claim, and of an entry without addresses
		address   = 64  // of an address, in a claim and in two entries
		namespace = 32  // of one in an exportTo
	)
	for _, c := range h.allClaims() {
		n += each + address*(len(c.addrs)+len(c.literal)+len(c.vips)) + namespace*len(c.exportTo.Namespaces)
	}
	return n
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

// wantsVIP reports whether the host may have an automatic VIP. One that is a Service, or that has
// an address from another object, needs none.
func (h *Host) wantsVIP() bool {
	for _, c := range h.claims {
		if c.addressed() || c.kubernetes() {
			return false
		}
	}
	return true
}

// vipsOf returns the automatic VIPs that the host has by a claim, of both families.
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

// Entry returns the entry of a host, and nil if clients with this view do not see the host, or get
// no address of it.
func (v *Viewer) Entry(h *Host) *Entry {
	if h == nil {
		return nil
	}
	key := variantKey{families: v.Families, vips: v.VIPs}
	visible := make([]*claim, 0, 8)
	var set claimSet
	for i, c := range h.claims {
		if v.sees(c) {
			set.add(i, len(h.claims))
			visible = append(visible, c)
		}
	}
	key.setVisible(&set)
	if v.around != nil {
		visible = v.around.narrow(h, visible, &key)
	}
	if len(visible) == 0 {
		return nil
	}
	target := v.Entry(h.target)
	if target != nil {
		key.target = target.Sum
	}
	return h.variant(key, func() *Entry { return v.build(h, visible, &key, target) })
}

// maxVariants bounds the entries that a host remembers: Sidecars that are edited again and again may show other claims
// each time.
const maxVariants = 64

// variant returns the entry with a key, which it makes if need be.
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
			entry, next = same(entry, *known), slices.Clip(*known)
		}
		if len(next) >= maxVariants {
			next = nil
		}
		if next = append(next, variant{key, entry}); h.variants.CompareAndSwap(known, &next) {
			return entry
		}
	}
}

// same returns the entry that was made before with the same content, or entry.
func same(entry *Entry, before []variant) *Entry {
	for _, known := range before {
		if entry != nil && known.entry != nil && bytes.Equal(known.entry.Encoded, entry.Encoded) {
			return known.entry
		}
	}
	return entry
}

// build makes the entry of a host of the visible claims. A claim without an address is ignored.
func (v *Viewer) build(h *Host, visible []*claim, key *variantKey, target *Entry) *Entry {
	var claims []visibleClaim
	for _, c := range visible {
		one := visibleClaim{claim: c}
		one.near, one.addrs = v.addrs(h, c, target)
		if key.near.has(c) {
			one.near, one.addrs = one.addrs, nil
		}
		if len(one.near)+len(one.addrs) > 0 {
			claims = append(claims, one)
		}
	}
	if len(claims) == 0 {
		return nil
	}
	return newEntry(mergeClaims(claims, h.alias))
}

// addrs returns the addresses of a claim for a client; of an alias also which are near. Like
// istiod, it returns the addresses in a ServiceEntry to every client, whatever its families: their
// author wants them used, and without them a client would resolve the name outside the mesh.
func (v *Viewer) addrs(h *Host, c *claim, target *Entry) (near, addrs []netip.Addr) {
	if target != nil && c.alias == h.claimedAlias() && c.alias != "" {
		near, addrs = target.addrs()
	}
	addrs = append(addrs, c.literal...)
	for _, a := range c.addrs {
		if v.Families.has(a) {
			addrs = append(addrs, a)
		}
	}
	if v.VIPs {
		for _, a := range h.vipsOf(c) {
			if v.Families.has(a) {
				addrs = append(addrs, a)
			}
		}
	}
	return near, addrs
}

// claimedAlias returns what the host is an alias of, as [Hosts.alias] does. Services of several
// clusters may differ in that.
func (h *Host) claimedAlias() string {
	for _, c := range h.claims {
		if c.alias != "" {
			return c.alias
		}
	}
	return ""
}
