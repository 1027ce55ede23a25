package hosts

import "github.com/nametap/nametap/discovery/object"

// mesh holds the settings of the mesh.
type mesh struct {
	object.Mesh
	defaults object.Mesh // used where no object sets a setting
}

func newMesh(defaults object.Mesh) mesh { return mesh{defaults, defaults} }

// put applies an object that has changed, and reports whether it has, or had, settings of
// the mesh.
func (m *mesh) put(old, current object.Object) bool {
	if old.Mesh == nil && current.Mesh == nil {
		return false
	}
	m.Mesh = m.defaults
	if current.Mesh != nil {
		m.Mesh = current.Mesh.Or(m.defaults)
	}
	return true
}

// ProxyMetadata returns the environment variables that all proxies have.
func (h *Hosts) ProxyMetadata() map[string]string { return h.mesh.ProxyMetadata }
