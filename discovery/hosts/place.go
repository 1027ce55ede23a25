package hosts

import "slices"

// A Place is where a client is, as far as that decides about its entries. The zero value is anywhere
// in the control plane's own cluster.
type Place struct {
	Cluster string // empty for the own one
	Network string // empty if it is not known
}

// otherNetwork stands for all networks that no cluster is in. It is no value of a label.
const otherNetwork = "?"

// Place returns the place of a client that claims to be of a cluster, and in a network; both may be
// empty. A cluster that is not known counts as the own one. Without a network, the cluster's
// network counts. Clients of unknown networks share a place, so their number does not grow with
// what clients claim.
func (s *Scene) Place(cluster, network string) Place {
	if !s.remote {
		return Place{} // all clients see the same
	}
	id, ok := s.number(cluster)
	if !ok {
		id, cluster = ownCluster, ""
	}
	if network == "" {
		network = s.around[id].network
	} else if !slices.ContainsFunc(s.around, func(p place) bool { return p.used && p.network == network }) {
		network = otherNetwork
	}
	return Place{cluster, network}
}

// surroundings say which claims of several clusters count at a place.
type surroundings struct {
	local clusterID
	// reach holds the clusters, by number, that are in the network of the place.
	reach []bool
}

// surroundings returns what surrounds a place; nil if there is only one cluster.
func (s *Scene) surroundings(p Place) *surroundings {
	if !s.remote {
		return nil
	}
	around := &surroundings{reach: make([]bool, len(s.around))}
	around.local, _ = s.number(p.Cluster) // the own one if the cluster was removed
	for i, c := range s.around {
		around.reach[i] = c.used && (c.network == "" || p.Network == "" || c.network == p.Network)
	}
	return around
}

// offers reports whether a client can use what a Service of a cluster says: an address of a Service
// is a name to a proxy, but endpoints must be in the client's network. The endpoints of a ServiceImport
// are of several networks: the controller that imports them lets its own cluster reach them.
func (s *surroundings) offers(c *claim) bool {
	if c.endpoints {
		return s.reach[c.cluster] && !c.clusterOnly || c.cluster == s.local && (c.imported || s.reach[c.cluster])
	}
	return c.alias != "" || len(c.addrs) > 0
}

// leading returns the visible claim of a Service that decides what the host is: the claim of the
// client's cluster, or else of the first cluster by name that offers an address or an alias. It is
// nil if no claim does.
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

// counts reports whether a claim counts beside the leading one: it has the same cluster, or adds
// endpoints to a headless Service. The name of a pod stands for the pod of one cluster, and a
// ServiceImport already has the endpoints of all.
func (s *surroundings) counts(c, leading *claim) bool {
	switch {
	case !c.kubernetes():
		return true
	case leading == nil || !s.offers(c):
		return false
	}
	return c.cluster == leading.cluster || c.endpoints && leading.endpoints && !leading.clusterOnly && !c.imported && !c.pod()
}

// nearCluster is the cluster whose endpoints come first, if set.
type nearCluster struct {
	id  clusterID
	set bool
}

// has reports whether the addresses of a claim come first.
func (n nearCluster) has(c *claim) bool { return n.set && c.endpoints && c.cluster == n.id }

// narrow returns the visible claims of a host that count, and completes the key with what decides
// about them. It changes visible.
func (s *surroundings) narrow(h *Host, visible []*claim, key *variantKey) []*claim {
	leading := s.leading(visible)
	var set claimSet
	local, remote := false, false
	rest, kept := visible, visible[:0]
	for i, c := range h.claims {
		if len(rest) == 0 || rest[0] != c {
			continue
		}
		rest = rest[1:]
		if !s.counts(c, leading) {
			continue
		}
		set.add(i, len(h.claims))
		kept = append(kept, c)
		if c.endpoints {
			local, remote = local || c.cluster == s.local, remote || c.cluster != s.local
		}
	}
	key.setVisible(&set)
	if local && remote {
		key.near = nearCluster{s.local, true}
	}
	return kept
}
