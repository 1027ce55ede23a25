package table

import (
	"slices"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// claimedNames maps the names that hosts claim besides their FQDNs to the FQDNs of these hosts. If several hosts claim
// a name, it belongs to the host with the smallest key. A claimed name has no effect if it equals an FQDN, or a short
// name that is derived from an FQDN, because lookups find these first. So claimedNames depends only on the claims. It
// is immutable, and tables share it.
type claimedNames struct {
	fqdns     map[wire.Name]wire.Name
	ancestors map[wire.Name]struct{} // the ancestors of all names
}

// newClaimed returns the names that hosts claim, or nil if there are none.
func newClaimed(hosts *hostSet) *claimedNames {
	claims := hosts.claims()
	if len(claims) == 0 {
		return nil
	}
	c := &claimedNames{fqdns: map[wire.Name]wire.Name{}, ancestors: map[wire.Name]struct{}{}}
	for _, claim := range claims {
		if _, taken := c.fqdns[claim.name]; taken {
			continue
		}
		c.fqdns[claim.name] = claim.fqdn
		for name := claim.name; name != wire.Root; {
			name = name.Parent()
			c.ancestors[name] = struct{}{}
		}
	}
	return c
}

// update returns the claimed names of hosts. c must be the claimed names of previous, and hosts may differ from
// previous only in the shards whose numbers are in changed. If these shards have the same claims in both, update
// returns c.
func (c *claimedNames) update(previous, hosts *hostSet, changed []int) *claimedNames {
	for _, i := range changed {
		if !slices.Equal(previous.shards[i].claims, hosts.shards[i].claims) {
			return newClaimed(hosts)
		}
	}
	return c
}

// find returns the FQDN of the host that a claimed name belongs to.
func (c *claimedNames) find(name wire.Name) (fqdn wire.Name, found bool) {
	if c == nil {
		return "", false
	}
	fqdn, found = c.fqdns[name]
	return fqdn, found
}

// all yields the names with the FQDNs of their hosts.
func (c *claimedNames) all(yield func(name, fqdn wire.Name) bool) {
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
func (c *claimedNames) hasBelow(name wire.Name) bool {
	if c == nil {
		return false
	}
	_, found := c.ancestors[name]
	return found
}
