package hosts

// A Place is where a client is, as far as the client's entries depend on it. The zero value is
// anywhere in the control plane's own cluster.
type Place struct {
	Cluster string // empty for the own cluster
	Network string // empty if it is not known
}

// otherNetwork stands for all networks that no cluster is in. It is no value of a label.
const otherNetwork = "?"

// surroundings decide which claims of several clusters count at a place.
type surroundings struct {
	local clusterID
	// reach holds the clusters, by number, that are in the network of the place.
	reach []bool
}

// offers reports whether a client can use the addresses or the alias in the claim of a Service. To a
// proxy, the address of a Service stands for its name, so the address in any cluster will do.
// Endpoints must be in the client's network. The endpoints of a ServiceImport are in several
// networks: the controller that imports them lets its own cluster reach them.
func (s *surroundings) offers(c *claim) bool {
	if c.endpoints {
		return s.reach[c.cluster] && !c.clusterOnly || c.cluster == s.local && (c.imported || s.reach[c.cluster])
	}
	return c.alias != "" || len(c.addrs) > 0
}

// leading returns the claim that decides what the host is. Of the visible claims of Services that
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

// counts reports whether c counts beside the leading claim: c is of the same cluster, adds endpoints
// to a headless Service, or is not of a Service. The name of a pod stands for the pod of one cluster,
// and a ServiceImport already has the endpoints of all clusters.
func (s *surroundings) counts(c, leading *claim) bool {
	switch {
	case !c.kubernetes():
		return true
	case leading == nil || !s.offers(c):
		return false
	}
	return c.cluster == leading.cluster || c.endpoints && leading.endpoints && !leading.clusterOnly && !c.imported && !c.pod()
}

// narrow returns the visible claims of h that count, and sets the fields of key that depend on them.
// It changes visible.
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
