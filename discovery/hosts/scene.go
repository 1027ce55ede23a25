package hosts

import (
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// A Scene has what decides which of the hosts a client sees: the Sidecars, the settings of the mesh, and the clusters.
// It does not change.
type Scene struct {
	sidecars namespaceSidecars
	settings object.Mesh
	around   []place // of the clusters, by number
	remote   bool    // there is more than one cluster
}

// place has the name and the network of a cluster. It is the zero value for a number that no cluster has.
type place struct {
	name, network string
	used          bool
}

// Sidecar returns the Sidecar that limits the hosts of a workload: a Sidecar of its namespace that selects the
// workload, or else the Sidecar of the root namespace that selects all workloads.
func (s *Scene) Sidecar(namespace string, labels Labels) Limit {
	if limit := s.sidecars.find(namespace, labels); limit.sidecar != nil {
		return limit
	}
	return s.sidecars.find(s.settings.RootNamespace, nil)
}

// ProxyMetadata returns the environment variables that all proxies have.
func (s *Scene) ProxyMetadata() map[string]string { return s.settings.ProxyMetadata }

// IsRoot reports whether the Sidecars of a namespace may limit the clients of all namespaces.
func (s *Scene) IsRoot(namespace string) bool { return namespace == s.settings.RootNamespace }

// Place returns the place of a client that claims to be in a cluster and in a network; both may be
// empty. A cluster that is not known counts as the own cluster. If network is empty, the network of the
// cluster counts. Clients in unknown networks share a place, so the number of places does not grow with
// the networks that clients claim.
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

// surroundings returns what surrounds a place; nil if there is only one cluster.
func (s *Scene) surroundings(p Place) *surroundings {
	if !s.remote {
		return nil
	}
	around := &surroundings{reach: make([]bool, len(s.around))}
	around.local, _ = s.number(p.Cluster) // the own cluster if p.Cluster was removed
	for i, c := range s.around {
		around.reach[i] = c.used && (c.network == "" || p.Network == "" || c.network == p.Network)
	}
	return around
}

// Viewer returns a viewer that sees hosts as the view v shows them.
func (s *Scene) Viewer(v View) Viewer {
	b := Base{Families: v.Families, VIPs: v.VIPs, Sidecar: v.Sidecar, Place: v.Place}
	b.allVisible, b.named, b.ownVisible = s.settings.Shows(v.Namespace)
	return Viewer{Base: b, Namespace: v.Namespace, around: s.surroundings(v.Place)}
}

// number returns the number of the cluster with a name; ok is false if there is none.
func (s *Scene) number(name string) (id clusterID, ok bool) {
	i := slices.IndexFunc(s.around, func(p place) bool { return p.used && p.name == name })
	return clusterID(max(i, 0)), i >= 0 //nolint:gosec // clusterOf has numbered it
}
