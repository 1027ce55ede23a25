package hosts

import (
	"fmt"
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// servicesName reports whether the name of a host, which may be a wildcard, belongs to Services: whether it is at or
// below the cluster domain, or at or below "svc". It returns the namespace that the name itself names, as
// api.bank.svc.cluster.local and *.bank.svc name bank; empty if there is none.
func servicesName(key, domain string) (namespace string, belongs bool) {
	path := "." + strings.TrimPrefix(key, "*.")
	path, below := strings.CutSuffix(path, "."+domain)
	path, services := strings.CutSuffix(path, ".svc")
	if !services {
		return "", below
	}
	return path[strings.LastIndexByte(path, '.')+1:], true
}

// admit returns the claim to a host as it counts, and nil if it does not. ServiceEntries have names of Services only in
// the namespace that the name names, and hosts of one label, which are Services' short names, only for their own
// namespace. The root namespace, to which the whole mesh belongs, is exempt.
func (h *Hosts) admit(key string, c claimOf) *claim {
	if !c.kubernetes() && c.namespace != h.mesh.RootNamespace {
		named, belongs := servicesName(key, h.domain)
		switch {
		case belongs && named != c.namespace:
			h.problems.add(key, object.Error{
				File: c.object.String(), Field: "spec.hosts", Object: c.object, Msg: foreignMessage(c.host, named, h.mesh.RootNamespace),
			})
			return nil
		case !belongs && !strings.Contains(key, "."):
			own := *c.claim
			own.private = true
			return &own
		}
	}
	return h.usage.limited(c.claim)
}

// foreignMessage says why a ServiceEntry does not have a host whose name belongs to Services.
func foreignMessage(host, named, root string) string {
	owners := "of the root namespace " + root
	if named != "" {
		owners = "of the namespace " + named + ", or " + owners
	}
	return fmt.Sprintf("the host %q is left out: its name belongs to Services, and to ServiceEntries %s", host, owners)
}

// problems has what is wrong with hosts, by their keys. Any tenant can make many of them, so they are sorted only after
// a change. The zero value has none.
type problems struct {
	byHost map[string][]object.Error
	list   []object.Error // sorted; nil if byHost has changed
}

func (p *problems) add(key string, e object.Error) {
	if p.byHost == nil {
		p.byHost = map[string][]object.Error{}
	}
	p.byHost[key], p.list = append(p.byHost[key], e), nil
}

// remove removes the problems of a host.
func (p *problems) remove(key string) {
	if len(p.byHost[key]) > 0 {
		delete(p.byHost, key)
		p.list = nil
	}
}

// sorted returns the problems in order: the same slice until they change. The caller must not change the slice.
func (p *problems) sorted() []object.Error {
	if p.list == nil {
		p.list = []object.Error{}
		for _, key := range sortedKeys(p.byHost) {
			p.list = append(p.list, p.byHost[key]...)
		}
	}
	return slices.Clip(p.list)
}
