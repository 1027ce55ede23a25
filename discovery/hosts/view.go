package hosts

import "net/netip"

// Families are the address families of a client.
type Families struct{ V4, V6 bool }

func (f Families) includes(a netip.Addr) bool {
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

// A Base is everything that determines what a viewer sees, except for hosts that the viewer's namespace sees in
// another way than other namespaces do.
type Base struct {
	Families Families
	VIPs     bool
	Sidecar  Limit
	Place    Place
	// allVisible is true if all hosts without an exportTo are visible, and ownVisible is true if the ones in the
	// viewer's namespace are visible.
	allVisible, ownVisible bool
}

// A Viewer looks at hosts through a view. It is valid until the next [Update] in which Views is true. It is safe for
// concurrent use.
type Viewer struct {
	Base
	Namespace string
	around    *surroundings // nil with one cluster
}

// AtBase returns a viewer that sees what all viewers with v's base have in common. Only the hosts that [Set.Special]
// yields may differ between the two viewers.
func (v *Viewer) AtBase() Viewer { return Viewer{Base: v.Base, around: v.around} }

// SeesOwn reports whether the viewer may see hosts of its own namespace that other namespaces do not see, for another
// reason than an exportTo that names the namespace.
func (v *Viewer) SeesOwn() bool {
	return v.ownVisible && !v.allVisible || v.Sidecar.sidecar != nil && v.Sidecar.sidecar.egress.FromOwn()
}

// sees reports whether the view shows what a claim says.
func (v *Viewer) sees(c *claim) bool {
	return v.isExported(c) && (v.Sidecar.sidecar == nil || v.Sidecar.sidecar.egress.Shows(v.Namespace, c.namespace, c.owner()))
}

// isExported reports whether the namespace of the view may see what a claim says.
func (v *Viewer) isExported(c *claim) bool {
	if c.exportTo.IsDefault() {
		return v.allVisible || v.ownVisible && c.namespace == v.Namespace
	}
	return c.exportTo.VisibleIn(v.Namespace)
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

// build makes the entry of a host from its visible claims. It ignores claims without an address.
func (v *Viewer) build(h *Host, visible []*claim, key *variantKey, target *Entry) *Entry {
	var claims []visibleClaim
	for _, c := range visible {
		one := visibleClaim{claim: c}
		one.near, one.addrs = v.addrs(h, c, target)
		if key.near.contains(c) {
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

// addrs returns the addresses of a claim for a client. Only an alias has near addresses here: the near addresses
// of its target. Like istiod, addrs returns the addresses in a ServiceEntry for every client, whatever the
// client's families: the author of the ServiceEntry wants them used, and without them a client would resolve the
// name outside the mesh.
func (v *Viewer) addrs(h *Host, c *claim, target *Entry) (near, addrs []netip.Addr) {
	if target != nil && c.alias == h.claimedAlias() && c.alias != "" {
		near, addrs = target.addrs()
	}
	addrs = append(addrs, c.literal...)
	for _, a := range c.addrs {
		if v.Families.includes(a) {
			addrs = append(addrs, a)
		}
	}
	if v.VIPs {
		for _, a := range h.vipsOf(c) {
			if v.Families.includes(a) {
				addrs = append(addrs, a)
			}
		}
	}
	return near, addrs
}
