package table

import (
	"cmp"
	"slices"
	"sort"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// claimed are the names that hosts claim besides their FQDNs, each with the FQDN of the host that
// has it: the first one, in the order of the hosts' keys. A FQDN, or a short name that is derived
// from one, hides such a name, because lookups find it earlier. So claimed names depend on claims
// only. They are immutable, and tables share them.
type claimed struct {
	fqdns     map[wire.Name]wire.Name
	ancestors map[wire.Name]struct{} // of all names
}

// find returns the FQDN of the host that has a claimed name.
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
	_, found := c.ancestors[name]
	return found
}

// nextClaimed returns the claimed names of next, which differs from t in the shards that changed
// lists. If these shards have the same claims, it returns t's.
func (t *Table) nextClaimed(next *Table, changed []int) *claimed {
	for _, i := range changed {
		if !slices.Equal(t.shards[i].claims, next.shards[i].claims) {
			return next.settleClaims()
		}
	}
	return t.claimed
}

// settleClaims returns the names that the hosts of the table claim.
func (t *Table) settleClaims() *claimed {
	claims := t.claims()
	if len(claims) == 0 {
		return nil
	}
	c := &claimed{fqdns: map[wire.Name]wire.Name{}, ancestors: map[wire.Name]struct{}{}}
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

// claims returns the claims of all hosts, in the order of the hosts' keys.
func (t *Table) claims() []claim {
	var claims []claim
	for i := range t.shards {
		claims = append(claims, t.shards[i].claims...)
	}
	slices.SortStableFunc(claims, func(x, y claim) int { return cmp.Compare(x.key, y.key) })
	return claims
}

// findCollisions sets collisions.
func (t *Table) findCollisions() {
	var found []Collision
	for i := range t.shards {
		found = append(found, t.shards[i].collisions...)
	}
	var s Scratch
	for _, c := range t.claims() {
		if winner, taken := t.owner(c.name, &s); taken && winner.Name != c.fqdn {
			found = append(found, collision(c.name, winner.info(&t.Cluster).key, c.key))
		}
	}
	var heads [3]wire.Name
	for h := range t.all {
		if !h.derived() {
			continue
		}
		for _, name := range t.Cluster.heads(h.Name, heads[:0]) {
			if winner, _ := t.owner(name, &s); winner.Name != h.Name && !name.Special() {
				found = append(found, collision(name, winner.info(&t.Cluster).key, h.info(&t.Cluster).key))
			}
		}
	}
	sort.Slice(found, func(i, j int) bool {
		x, y := found[i], found[j]
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.Winner, y.Winner), cmp.Compare(x.Loser, y.Loser)) < 0
	})
	t.collisions = slices.Compact(found)
}
