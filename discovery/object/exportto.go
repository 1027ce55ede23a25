package object

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The scopes of exportTo that are not names of namespaces.
const (
	exportToPublic  = "*"
	exportToPrivate = "."
	exportToNone    = "~"
)

// ExportTo says which namespaces see a host. The zero value stands for the mesh's default.
type ExportTo struct {
	Public     bool     // all namespaces
	Restricted bool     // only Namespaces
	Namespaces []string // sorted; only meaningful if Restricted
}

// NewExportTo returns the ExportTo for the scopes in the exportTo of an object. The parameter namespace is that of the
// object. The scope "*" means all namespaces, "." the object's own, and "~" none; other scopes are names of namespaces.
// As in istiod, "*" prevails over all others, and "~" over the rest. The error names a scope that is not valid; the
// other scopes count.
func NewExportTo(scopes []string, namespace string) (ExportTo, error) {
	e := ExportTo{Restricted: true}
	var err error
	for _, scope := range scopes {
		switch {
		case scope == exportToPrivate:
			e.Namespaces = append(e.Namespaces, namespace)
		case scope == exportToPublic || scope == exportToNone:
		case IsLabel(scope):
			e.Namespaces = append(e.Namespaces, scope)
		default:
			err = cmp.Or(err, fmt.Errorf(`want namespaces, ".", "*" or "~", got %q`, scope))
		}
	}
	switch {
	case len(scopes) == 0:
		return ExportTo{}, nil
	case slices.Contains(scopes, exportToPublic):
		return ExportTo{Public: true}, err
	case slices.Contains(scopes, exportToNone):
		return ExportTo{Restricted: true}, err
	}
	slices.Sort(e.Namespaces)
	e.Namespaces = slices.Compact(e.Namespaces)
	return e, err
}

// SplitScopes returns the scopes in a list that is separated by commas. As in istiod, only an empty text stands for no
// list: a list without scopes, such as ",", names no namespace.
func SplitScopes(text string) []string {
	var scopes []string
	for scope := range strings.SplitSeq(text, ",") {
		if scope = strings.TrimSpace(scope); scope != "" {
			scopes = append(scopes, scope)
		}
	}
	if len(scopes) == 0 && text != "" {
		return []string{exportToNone}
	}
	return scopes
}

// IsDefault reports whether e stands for the mesh's default.
func (e ExportTo) IsDefault() bool { return !e.Public && !e.Restricted }

// Equal reports whether e and other are equal.
func (e ExportTo) Equal(other ExportTo) bool {
	return e.Public == other.Public && e.Restricted == other.Restricted && slices.Equal(e.Namespaces, other.Namespaces)
}

// VisibleIn reports whether clients in a namespace see the host. If e stands for the default, it reports true.
func (e ExportTo) VisibleIn(namespace string) bool {
	if !e.Restricted {
		return true
	}
	_, found := slices.BinarySearch(e.Namespaces, namespace)
	return found
}

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
