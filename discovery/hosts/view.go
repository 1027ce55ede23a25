package hosts

import (
	"net/netip"
	"slices"
)

// Families are the address families of a client.
type Families struct{ V4, V6 bool }

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
	// Of hosts without an exportTo, allVisible is true if all are visible, and ownVisible if those in the viewer's
	// namespace are. named is true if the settings of the mesh name that namespace, and so show it all.
	allVisible, named, ownVisible bool
}

// A Viewer looks at hosts through a view. It is valid until the next [Update] in which Views is true. It is safe for
// concurrent use.
type Viewer struct {
	Base
	Namespace string
	around    *surroundings // nil with one cluster
}

// AtBase returns a viewer that sees what all viewers with v's base have in common. The two viewers may see only
// hosts in the shards that [Special.Shards] returns in different ways.
func (v *Viewer) AtBase() Viewer { return Viewer{Base: v.Base, around: v.around} }

// SeesOwn reports whether the viewer may see hosts of its own namespace that other namespaces do not see, for another
// reason than an exportTo that names the namespace.
func (v *Viewer) SeesOwn() bool {
	return v.ownVisible && !v.allVisible || v.Sidecar.sidecar != nil && v.Sidecar.sidecar.egress.FromOwn()
}

// sees reports whether the namespace of the view may see what a claim says, and the Sidecar shows it.
func (v *Viewer) sees(c *claim) bool {
	switch {
	case c.private && c.namespace != v.Namespace:
		return false
	case c.exportTo.IsDefault() && !v.allVisible && (!v.ownVisible || c.namespace != v.Namespace):
		return false
	case !c.exportTo.VisibleIn(v.Namespace):
		return false
	}
	return v.Sidecar.sidecar == nil || v.Sidecar.sidecar.egress.Shows(v.Namespace, c.namespace, c.owner(), c.ports)
}

// withholds reports whether a claim is not shown because of the size of its namespace (see usage). The claim owns its host
// all the same: otherwise the host would pass to another object that claims it.
func (v *Viewer) withholds(c *claim) bool { return c.dropped || c.hidden && c.namespace != v.Namespace }

// counting returns the claims to a host that count for the viewer: those that it sees, of one namespace. This is, as in
// istiod, the viewer's own namespace, or else the namespace of a Service, of an object that is exported to the viewer's
// namespace by name, or of the oldest object. With several clusters, it returns those that count at the viewer's place,
// and the cluster whose endpoints come first. The claims are appended to the empty slice claims, so that they need no
// allocation.
func (v *Viewer) counting(h *Host, claims []*claim) ([]*claim, nearCluster) {
	var owner *claim
	for _, c := range h.claims {
		if !v.sees(c) {
			continue
		}
		if claims = append(claims, c); owner == nil || v.rank(c) < v.rank(owner) {
			owner = c
		}
	}
	claims = slices.DeleteFunc(claims, func(c *claim) bool { return c.namespace != owner.namespace || v.withholds(c) })
	if v.around != nil {
		return v.around.narrow(claims)
	}
	return claims, nearCluster{}
}

// rank orders the claims to a host by who owns the host; a lower rank comes first, and the older of two with one rank.
func (v *Viewer) rank(c *claim) int {
	switch {
	case c.namespace == v.Namespace:
		return 0
	case c.kubernetes():
		return 1
	case c.exportTo.Restricted || v.named && c.exportTo.IsDefault():
		return 2
	}
	return 3
}

// maxAliases bounds how many aliases in a row a client may have to follow. Any tenant can make a long row.
const maxAliases = 16

// follow returns what a host stands for, because of the claims that count: the name at the end of the chain of aliases,
// and the entry that answers for it, which is nil for a name outside the mesh. The name is empty if the host is no alias.
// ok is false if the chain is longer than maxAliases, or has no end.
func (v *Viewer) follow(h *Host, claims []*claim) (name string, target *Entry, ok bool) {
	for range maxAliases + 1 {
		a := h.aliasOf(claims)
		if a == nil {
			if name != "" {
				target = v.Entry(h)
			}
			return name, target, true
		}
		name, h = a.name, nil
		for _, t := range a.targets {
			if claims, _ = v.counting(t, nil); t.aliasOf(claims) != nil || v.Entry(t) != nil {
				h = t
				break
			}
		}
		if h == nil {
			return name, nil, true
		}
	}
	return "", nil, false
}

// Entry returns the entry of a host, and nil if the host is not in the table of clients with this view: they do not see
// it, or it is a host of a ServiceEntry of which they get no address.
func (v *Viewer) Entry(h *Host) *Entry {
	if h == nil {
		return nil
	}
	claims, near := v.counting(h, make([]*claim, 0, 8))
	if len(claims) == 0 {
		return nil
	}
	key := variantKey{families: v.Families, vips: v.VIPs, near: near}
	if len(h.aliases) > 0 {
		var ok bool
		if key.alias, key.target, ok = v.follow(h, claims); !ok {
			return nil
		}
	}
	return h.variant(key, claims, func() *Entry { return v.build(h, claims, &key) })
}

// build makes the entry of a host from the claims that count. Claims of Services come before those of ServiceEntries,
// unless only the latter have an address. A Service is in the table without an address, too: its name exists.
func (v *Viewer) build(h *Host, claims []*claim, key *variantKey) *Entry {
	if key.alias != "" {
		return newEntry(aliasOf(claims, key.alias, key.target))
	}
	vips := v.usable(h.vipsOf(claims))
	var services, addressed []visibleClaim
	for _, c := range claims {
		one := visibleClaim{claim: c, addrs: slices.Concat(c.literal, v.usable(c.addrs))}
		if v.VIPs && c.wantsVIP {
			one.addrs = append(one.addrs, vips...)
		}
		if key.near.set && c.endpoints && c.cluster == key.near.id {
			one.near, one.addrs = one.addrs, nil
		}
		if c.kubernetes() {
			services = append(services, one)
		}
		if len(one.near)+len(one.addrs) > 0 {
			addressed = append(addressed, one)
		}
	}
	isService := func(c visibleClaim) bool { return c.kubernetes() }
	switch {
	case slices.ContainsFunc(addressed, isService):
		addressed = slices.DeleteFunc(addressed, func(c visibleClaim) bool { return !isService(c) })
	case len(addressed) == 0:
		addressed = services
	}
	if len(addressed) == 0 {
		return nil
	}
	return newEntry(merge(h, addressed))
}

// usable returns the addresses of the viewer's families. Like istiod, a viewer gets the addresses in a ServiceEntry
// whatever its families: the author of the ServiceEntry wants them used, and without them a client would resolve the
// name outside the mesh.
func (v *Viewer) usable(addrs []netip.Addr) []netip.Addr {
	if v.Families.V4 && v.Families.V6 {
		return addrs
	}
	var all []netip.Addr
	for _, a := range addrs {
		if a.Is4() && v.Families.V4 || a.Is6() && v.Families.V6 {
			all = append(all, a)
		}
	}
	return all
}
