package hosts

import (
	"maps"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// A Scene decides, besides the hosts, what a client sees: Sidecars, settings of the mesh, and the
// clusters. It does not change.
type Scene struct {
	sidecars sidecars
	settings object.Mesh
	around   []place // of the clusters, by number
	remote   bool    // there is more than one cluster
}

// place is where a cluster is; a number that is free has the zero value.
type place struct {
	name, network string
	used          bool
}

// newScene returns the current scene.
func (h *Hosts) newScene() *Scene {
	s := &Scene{sidecars: maps.Clone(h.sidecars), settings: h.mesh.Mesh, around: make([]place, len(h.clusters)), remote: h.remote > 0}
	for i, c := range h.clusters {
		if c != nil {
			s.around[i] = place{c.name, c.network, true}
		}
	}
	return s
}

// A Limit is a Sidecar that limits the hosts of a client. The zero value is none.
type Limit struct {
	Key object.Key
	is  *sidecar
}

// Sidecar returns the Sidecar that limits the hosts of a workload: one of its namespace that selects it, or else
// the one of the root namespace that selects all.
func (s *Scene) Sidecar(namespace string, labels Labels) Limit {
	if of := s.sidecars.of(namespace, labels); of.is != nil {
		return of
	}
	return s.sidecars.of(s.settings.RootNamespace, nil)
}

// IsRoot reports whether the Sidecars of a namespace may limit the clients of all.
func (s *Scene) IsRoot(namespace string) bool { return namespace == s.settings.RootNamespace }

// Viewer returns the viewer of a view.
func (s *Scene) Viewer(v View) Viewer {
	b := Base{Families: v.Families, VIPs: v.VIPs, Sidecar: v.Sidecar, Place: v.Place}
	b.all, b.own = s.settings.Shows(v.Namespace)
	return Viewer{Base: b, Namespace: v.Namespace, around: s.surroundings(v.Place)}
}

// number returns the number of the cluster with a name; ok is false if there is none.
func (s *Scene) number(name string) (id clusterID, ok bool) {
	i := slices.IndexFunc(s.around, func(p place) bool { return p.used && p.name == name })
	return clusterID(max(i, 0)), i >= 0 //nolint:gosec // addCluster has numbered it
}
