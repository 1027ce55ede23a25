package hosts

import "slices"

// A Place says in which cluster and network a client is. The client's entries depend on it. The
// zero value is the control plane's own cluster, with an unknown network.
type Place struct {
	Cluster string // empty for the own cluster
	Network string // empty if it is not known
}

// otherNetwork stands for all networks that no cluster is in. No cluster is in a network with this name, because it is
// not a valid value of a label.
const otherNetwork = "?"

// surroundings decide which claims of several clusters count at a place.
type surroundings struct {
	local clusterID
	// reach says, for the number of each cluster, whether the cluster may be in the network of the place.
	reach []bool
}

// offers reports whether a client can use the addresses or the alias in the claim of a Service. To a proxy, the address
// of a Service stands for its name, so the address in any cluster will do. Endpoints must be in the client's network.
// The endpoints of a ServiceImport may be in other networks: the controller that imports them makes them reachable from
// its own cluster.
func (s *surroundings) offers(c *claim) bool {
	if c.endpoints {
		return s.reach[c.cluster] && !c.clusterOnly || c.cluster == s.local && (c.imported || s.reach[c.cluster])
	}
	return c.alias != "" || len(c.addrs) > 0
}

// leading returns the claim that decides what the host is. Of the claims of Services that
// offer an address or an alias, it is the claim of the client's cluster, or else of the first cluster
// by name. It is nil if there is no such claim.
func (s *surroundings) leading(claims []*claim) *claim {
	var first *claim
	for _, c := range claims {
		switch {
		case !c.kubernetes() || !s.offers(c):
		case c.cluster == s.local:
			return c
		case first == nil:
			first = c
		}
	}
	return first
}

// counts reports whether c counts beside the leading claim. It does if c is of the same cluster, if c adds endpoints to
// a headless Service, or if c is not of a Service. Other clusters add nothing to a pod, because its name stands for the
// pod of one cluster, and nothing to a ServiceImport, which already has the endpoints of all clusters.
func (s *surroundings) counts(c, leading *claim) bool {
	switch {
	case !c.kubernetes():
		return true
	case leading == nil || !s.offers(c):
		return false
	}
	return c.cluster == leading.cluster || c.endpoints && leading.endpoints && !leading.clusterOnly && !c.imported && !c.pod()
}

// narrow returns the claims to a host that count at the place, and the cluster whose endpoints come first. It overwrites
// the slice claims.
func (s *surroundings) narrow(claims []*claim) ([]*claim, nearCluster) {
	leading := s.leading(claims)
	claims = slices.DeleteFunc(claims, func(c *claim) bool { return !s.counts(c, leading) })
	isLocal := func(c *claim) bool { return c.endpoints && c.cluster == s.local }
	isRemote := func(c *claim) bool { return c.endpoints && c.cluster != s.local }
	if slices.ContainsFunc(claims, isLocal) && slices.ContainsFunc(claims, isRemote) {
		return claims, nearCluster{s.local, true}
	}
	return claims, nearCluster{}
}
