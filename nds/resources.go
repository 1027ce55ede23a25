package nds

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
)

// TypeURL is the type of the resources that are asked for.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// Resource is one NameTable as it came.
type Resource struct {
	// Name is empty in what istiod sends.
	Name string
	// Version is the resource's own, empty in what istiod sends.
	Version string
	// Value holds the wire bytes of the NameTable; nobody may change them.
	Value []byte
}

// fold returns the set of resources, sorted by name, that r makes of set, which
// it does not change. In a whole response several resources may be without a
// name; they stay in their order.
func fold(set []Resource, r response) ([]Resource, error) {
	if r.typeURL != TypeURL {
		return nil, fmt.Errorf("response of type %q: want %q", r.typeURL, TypeURL)
	}
	named := make(map[string]bool, len(r.resources))
	next := make([]Resource, 0, len(r.resources))
	for _, resource := range r.resources {
		name, body := resource.GetName(), resource.GetResource()
		if body.GetTypeUrl() != TypeURL {
			return nil, fmt.Errorf("resource %q of type %q: want %q", name, body.GetTypeUrl(), TypeURL)
		}
		if named[name] && (!r.whole || name != "") {
			return nil, fmt.Errorf("resource %q twice in one response", name)
		}
		named[name] = true
		next = append(next, Resource{Name: name, Version: resource.GetVersion(), Value: body.GetValue()})
	}
	if !r.whole {
		gone := named
		for _, name := range r.removed {
			gone[name] = true
		}
		for _, resource := range set {
			if !gone[resource.Name] {
				next = append(next, resource)
			}
		}
	}
	slices.SortStableFunc(next, func(a, b Resource) int { return cmp.Compare(a.Name, b.Name) })
	return next, nil
}

// sameContent reports whether two sets hold the same tables under the same
// names. Versions do not count: istiod repeats tables under new ones, and
// versions over new tables.
func sameContent(a, b []Resource) bool {
	return slices.EqualFunc(a, b, func(a, b Resource) bool {
		return a.Name == b.Name && bytes.Equal(a.Value, b.Value)
	})
}

// isEmpty reports whether a set has no hosts.
func isEmpty(set []Resource) bool {
	return !slices.ContainsFunc(set, func(r Resource) bool { return len(r.Value) > 0 })
}
