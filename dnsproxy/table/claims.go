package table

import (
	"slices"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// claimed maps the names that hosts claim besides their FQDNs to the FQDNs of these hosts. If several hosts claim a
// name, it belongs to the host with the smallest key. A claimed name has no effect if it equals an FQDN, or a short
// name that is derived from an FQDN, because lookups find these first. So claimed depends only on the claims. It is
// immutable, and tables share it.
type claimed struct {
	fqdns map[wire.Name]wire.Name
	above map[wire.Name]struct{} // the ancestors of all names
}

// newClaimed returns the names that hosts claim, or nil if there are none.
func newClaimed(hosts *hostSet) *claimed {
	claims := hosts.claims()
	if len(claims) == 0 {
		return nil
	}
	c := &claimed{fqdns: map[wire.Name]wire.Name{}, above: map[wire.Name]struct{}{}}
	for _, claim := range claims {
		if _, taken := c.fqdns[claim.name]; taken {
			continue
		}
		c.fqdns[claim.name] = claim.fqdn
		for name := claim.name; name != wire.Root; {
			name = name.Parent()
			c.above[name] = struct{}{}
		}
	}
	return c
}

// next returns the claimed names of the hosts in after. after differs from before in the shards whose numbers are in
// changed. If these shards have the same claims, it returns c.
func (c *claimed) next(before, after *hostSet, changed []int) *claimed {
	for _, i := range changed {
		if !slices.Equal(before.shards[i].claims, after.shards[i].claims) {
			return newClaimed(after)
		}
	}
	return c
}

// find returns the FQDN of the host that a claimed name belongs to.
func (c *claimed) find(name wire.Name) (fqdn wire.Name, found bool) {
	if c == nil {
		return "", false
	}
	fqdn, found = c.fqdns[name]
	return fqdn, found
}

// all yields the names with the FQDNs of their hosts.
func (c *claimed) all(yield func(name, fqdn wire.Name) bool) {
	if c == nil {
		return
	}
	for name, fqdn := range c.fqdns {
		if !yield(name, fqdn) {
			return
		}
	}
}

// hasBelow reports whether name is an ancestor of a claimed name.
func (c *claimed) hasBelow(name wire.Name) bool {
	if c == nil {
		return false
	}
	_, found := c.above[name]
	return found
}
