package hosts

import (
	"fmt"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// servicesName reports whether the name of a host, which may be a wildcard, belongs to Services: whether it is at or
// below the cluster domain, or at or below "svc". It returns the namespace that the name itself names, as
// api.bank.svc.cluster.local and *.bank.svc name bank; empty if there is none.
func servicesName(key, domain string) (namespace string, belongs bool) {
	path, below := cutParent(strings.TrimPrefix(key, "*."), domain)
	path, services := cutParent(path, "svc")
	if !services {
		return "", below
	}
	return path[strings.LastIndexByte(path, '.')+1:], true
}

// cutParent returns the labels of a name below its parent, and false if it is neither at nor below that.
func cutParent(name, parent string) (labels string, found bool) {
	if name == parent {
		return "", true
	}
	labels, found = strings.CutSuffix(name, parent)
	if !found || !strings.HasSuffix(labels, ".") {
		return name, false
	}
	return labels[:len(labels)-1], true
}

// admit returns the claim to a host as it counts, and nil if it does not. ServiceEntries have names of Services only in
// the namespace that the name names, and hosts of one label, which are Services' short names, only for their own
// namespace. The root namespace, to which the whole mesh belongs, is exempt.
func (h *Hosts) admit(key string, c claimOf) *claim {
	if !c.kubernetes() && c.namespace != h.mesh.RootNamespace {
		named, belongs := servicesName(key, h.domain)
		switch {
		case belongs && named != c.namespace:
			owners := "of the root namespace " + h.mesh.RootNamespace
			if named != "" {
				owners = "of the namespace " + named + ", or " + owners
			}
			h.addProblem(key, c.object, "spec.hosts", fmt.Sprintf("the host %q is left out: its name belongs to Services, and to ServiceEntries %s", c.host, owners))
			return nil
		case !belongs && !strings.Contains(key, "."):
			own := *c.claim
			own.private = true
			return &own
		}
	}
	return c.claim
}

// addProblem adds what is wrong with a host in a field of an object.
func (h *Hosts) addProblem(key string, o object.Key, field, message string) {
	e := object.Error{File: o.String(), Field: field, Object: o, Msg: message}
	h.problems.set(key, append(h.problems.byKey[key], e)...)
}
