package discovery

import (
	"net/netip"
	"slices"

	"github.com/nametap/nametap/api"
)

const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// families are the address families of a client.
type families struct{ v4, v6 bool }

func (f families) has(a netip.Addr) bool {
	if a.Is4() {
		return f.v4
	}
	return f.v6
}

// viewKey is all that decides what a client sees. Clients with the same key
// share a view.
type viewKey struct {
	namespace string
	families  families
	vips      bool // automatic addresses are of use: a proxy takes connections to them
	merge     bool // the client merges several tables
}

// snapshot is what the objects say, before it is cut to a client's view. It
// does not change once it is made.
type snapshot struct {
	claims []claim
	slots  map[string]uint16 // automatic addresses, by hostKey
}

// tables builds the name tables of a view, by resource name: one without a
// name, or one per namespace for a client that merges. A host is in one table
// only, that of the first namespace that gives it an address.
func (s *snapshot) tables(v viewKey) map[string]*api.NameTable {
	byHost := make(map[string][]visibleClaim, len(s.claims))
	for i := range s.claims {
		c := &s.claims[i]
		if !c.exportTo.visibleIn(v.namespace) {
			continue
		}
		// A claim without an address is as if it were not there.
		if addrs := s.addrs(c, v); len(addrs) > 0 {
			k := hostKey(c.host)
			byHost[k] = append(byHost[k], visibleClaim{c, addrs})
		}
	}
	out := map[string]*api.NameTable{}
	if !v.merge {
		out[""] = &api.NameTable{}
	}
	for _, claims := range byHost {
		host, namespace, info := mergeClaims(claims)
		if !v.merge {
			namespace = ""
		}
		t := out[namespace]
		if t == nil {
			t = &api.NameTable{}
			out[namespace] = t
		}
		if t.Table == nil {
			t.Table = map[string]*api.NameTable_NameInfo{}
		}
		t.Table[host] = info
	}
	return out
}

// visibleClaim is a claim with the addresses that a client may have.
type visibleClaim struct {
	*claim
	addrs []netip.Addr
}

// addrs are the addresses of a claim for a client. Addresses written into a
// ServiceEntry go to every client, whatever its families, as from istiod: who
// wrote them wants them used, and without them the name would be resolved
// past the mesh.
func (s *snapshot) addrs(c *claim, v viewKey) []netip.Addr {
	addrs := slices.Clone(c.literal)
	for _, a := range c.addrs {
		if v.families.has(a) {
			addrs = append(addrs, a)
		}
	}
	if slot, ok := s.slots[hostKey(c.host)]; ok && c.wantsVIP && v.vips {
		for _, a := range []netip.Addr{slotAddr4(slot), slotAddr6(slot)} {
			if v.families.has(a) {
				addrs = append(addrs, a)
			}
		}
	}
	return addrs
}

func isKubernetes(c visibleClaim) bool { return c.kubernetes() }

// mergeClaims makes one entry of all claims to a host. A Kubernetes Service
// beats the ServiceEntries that decorate it; among equals addresses add up.
func mergeClaims(claims []visibleClaim) (host, namespace string, info *api.NameTable_NameInfo) {
	if slices.ContainsFunc(claims, isKubernetes) {
		claims = slices.DeleteFunc(claims, func(c visibleClaim) bool { return !isKubernetes(c) })
	}
	owner, host := claims[0], claims[0].host
	var addrs []netip.Addr
	for _, c := range claims {
		addrs = append(addrs, c.addrs...)
		// Hosts that differ in case only are one; neither the spelling nor
		// the owner may depend on the order of files.
		host = min(host, c.host)
		if c.namespace < owner.namespace {
			owner = c
		}
	}
	return host, owner.namespace, owner.info(addrs)
}

func (c visibleClaim) info(addrs []netip.Addr) *api.NameTable_NameInfo {
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	info := &api.NameTable_NameInfo{Registry: registryExternal, Ips: make([]string, len(addrs))}
	for i, a := range addrs {
		info.Ips[i] = a.String()
	}
	if c.kubernetes() {
		info.Registry, info.Shortname, info.Namespace = registryKubernetes, c.shortname, c.namespace
	}
	return info
}
