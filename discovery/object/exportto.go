package object

import (
	"fmt"
	"slices"
	"strings"
)

// The scopes of exportTo that are not names of namespaces.
const (
	exportToPublic  = "*"
	exportToPrivate = "."
	exportToNone    = "~"
)

// ExportTo says which namespaces see a host. The zero value means all.
type ExportTo struct {
	Restricted bool
	Namespaces []string // sorted; only meaningful if Restricted
}

// NewExportTo returns the namespaces of an exportTo of an object in namespace: "*", or no scope
// at all, means all namespaces, "." the object's own, "~" none; other scopes are names. The error
// says which scopes are not valid. They are left out.
func NewExportTo(scopes []string, namespace string) (ExportTo, error) {
	if len(scopes) == 0 || slices.Contains(scopes, exportToPublic) {
		return ExportTo{}, nil
	}
	e := ExportTo{Restricted: true}
	var err error
	for _, scope := range scopes {
		switch {
		case scope == exportToPrivate:
			e.Namespaces = append(e.Namespaces, namespace)
		case scope == exportToNone && len(scopes) == 1:
		case IsLabel(scope):
			e.Namespaces = append(e.Namespaces, scope)
		case err == nil:
			err = fmt.Errorf(`want namespaces, ".", "*" or "~" alone, got %q`, scope)
		}
	}
	slices.Sort(e.Namespaces)
	e.Namespaces = slices.Compact(e.Namespaces)
	return e, err
}

// ParseExportTo is NewExportTo for the scopes in an annotation, which commas separate.
func ParseExportTo(text, namespace string) (ExportTo, error) {
	var scopes []string
	for scope := range strings.SplitSeq(text, ",") {
		if scope = strings.TrimSpace(scope); scope != "" {
			scopes = append(scopes, scope)
		}
	}
	return NewExportTo(scopes, namespace)
}

// VisibleIn reports whether clients in a namespace see the host.
func (e ExportTo) VisibleIn(namespace string) bool {
	if !e.Restricted {
		return true
	}
	_, found := slices.BinarySearch(e.Namespaces, namespace)
	return found
}
