package hosts

import "slices"

// MaxShown bounds the size in tables of the hosts that a namespace shows to other namespaces, in bytes. The table of
// every client may have all of them, and agents refuse a table of more than 64 MiB. 100,000 Services have about 9 MiB.
const MaxShown = 16 << 20

// usage has the size of the hosts that each namespace shows to other namespaces. It depends on the current objects only,
// so replicas agree.
//
// A host counts for the namespaces of its claims, each with its own claims. An alias counts as if it had maxLent
// addresses: otherwise the size of a namespace would depend on other namespaces.
type usage struct {
	limit      int
	namespaces map[string]*shown
	hidden     listed[Hidden] // the namespaces beyond the limit
}

// shown has the hosts that a namespace shows to other namespaces.
type shown struct {
	size  int
	hosts map[string]bool // by hostKey
}

// Hidden is a namespace whose hosts are hidden from other namespaces, because they are too large.
type Hidden struct {
	Namespace string
	Size      int // of the hosts in tables, in bytes, when they became too large
}

func newUsage(limit int) *usage {
	return &usage{limit: limit, namespaces: map[string]*shown{}}
}

// follow counts changed hosts. It returns the hosts of the namespaces that have passed the limit, in either direction:
// they must be made again.
func (u *usage) follow(changes []HostChange) (passed map[string]bool) {
	changed := map[string]bool{}
	for _, c := range changes {
		u.count(c.Old, func(namespace string, size int) {
			changed[namespace] = true
			s := u.namespaces[namespace]
			s.size -= size
			delete(s.hosts, c.Old.Key)
		})
		u.count(c.New, func(namespace string, size int) {
			changed[namespace] = true
			if u.namespaces[namespace] == nil {
				u.namespaces[namespace] = &shown{hosts: map[string]bool{}}
			}
			s := u.namespaces[namespace]
			s.size += size
			s.hosts[c.New.Key] = true
		})
	}
	passed = map[string]bool{}
	for namespace := range changed {
		s := u.namespaces[namespace]
		if beyond := s.size > u.limit; beyond != u.hides(namespace) {
			if u.hidden.set(namespace); beyond {
				u.hidden.set(namespace, Hidden{namespace, s.size})
			}
			for key := range s.hosts {
				passed[key] = true
			}
		}
		if len(s.hosts) == 0 {
			delete(u.namespaces, namespace)
		}
	}
	return passed
}

// count calls yield with each namespace that shows a host to other namespaces, or would show it if it were not hidden, and
// with the size of its claims. A namespace may come twice. h may be nil.
func (u *usage) count(h *Host, yield func(namespace string, size int)) {
	for i := 0; h != nil && i < len(h.claims); i++ {
		if c := h.claims[i]; u.shows(c) {
			yield(c.namespace, c.size())
		}
	}
}

// shows reports whether a claim shows the host to other namespaces. Without an exportTo it counts as if it did, whatever
// the default of the mesh is.
func (u *usage) shows(c *claim) bool {
	return !c.private && (!c.exportTo.Restricted || slices.ContainsFunc(c.exportTo.Namespaces, func(n string) bool { return n != c.namespace }))
}

// hides reports whether the hosts of a namespace are hidden from other namespaces.
func (u *usage) hides(namespace string) bool { return len(u.hidden.byKey[namespace]) > 0 }

// limited returns a claim as it counts: if its namespace is hidden, only its namespace sees it.
func (u *usage) limited(c *claim) *claim {
	if !u.hides(c.namespace) {
		return c
	}
	own := *c
	own.hidden = true
	return &own
}
