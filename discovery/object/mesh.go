package object

import (
	"maps"
	"slices"
)

// DefaultRootNamespace is the root namespace of a mesh whose settings have none.
const DefaultRootNamespace = "istio-system"

// Mesh holds the settings of the mesh that are used.
type Mesh struct {
	// RootNamespace is the namespace whose Sidecar without a workloadSelector is the default of all
	// namespaces; empty if it is not set.
	RootNamespace string
	// ExportTo are the scopes of the hosts of Services and ServiceEntries without an exportTo, as in
	// [NewExportTo]. If there are none, all namespaces see these hosts.
	ExportTo []string
	// Selectors select, by labels, the namespaces that count. They have the form of kubectl's
	// --selector. A namespace counts if a selector matches its labels, or if there are no selectors.
	Selectors []string
	// ProxyMetadata are the environment variables that all proxies have.
	ProxyMetadata map[string]string
}

// Or returns m, with the settings of other for settings that m does not have.
func (m Mesh) Or(other Mesh) Mesh {
	if m.RootNamespace == "" {
		m.RootNamespace = other.RootNamespace
	}
	if len(m.ExportTo) == 0 {
		m.ExportTo = other.ExportTo
	}
	if len(m.Selectors) == 0 {
		m.Selectors = other.Selectors
	}
	return m
}

// Shows says which hosts without an exportTo are visible to clients in a namespace. allVisible is true if all of these
// hosts are visible, named if they are because the settings name the namespace, and ownVisible if the ones in the clients'
// own namespace are visible.
func (m Mesh) Shows(namespace string) (allVisible, named, ownVisible bool) {
	switch {
	case len(m.ExportTo) == 0 || slices.Contains(m.ExportTo, exportToPublic):
		return true, false, true
	case slices.Contains(m.ExportTo, exportToNone):
		return false, false, false
	}
	named = IsLabel(namespace) && slices.Contains(m.ExportTo, namespace)
	return named, named, slices.Contains(m.ExportTo, exportToPrivate)
}

// Equal reports whether two settings are the same.
func (m Mesh) Equal(other Mesh) bool {
	return m.RootNamespace == other.RootNamespace && slices.Equal(m.ExportTo, other.ExportTo) && slices.Equal(m.Selectors, other.Selectors) &&
		maps.Equal(m.ProxyMetadata, other.ProxyMetadata)
}
