package dnsproxy

import (
	"cmp"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Table is an immutable set of mesh hosts. Build one with [NewTable]; its
// methods may be called from any goroutine.
//
// Hosts are spread over shards by the hash of their names, so that the table of the
// next push can share those that did not change. Short names and search domains are
// not stored: they are derived when asked.
type Table struct {
	cluster cluster
	seed    maphash.Seed // of the tables before and after as well
	shards  [shardCount]shard
	reverse reverseIndex
	// aliases have the FQDN of the host that answers a name which cannot be derived
	// from it; nil without any.
	aliases          map[wire.Name]wire.Name
	hosts, wildcards int

	settled    sync.Once
	collisions []Collision // once settled

	descended sync.Once
	ancestors map[wire.Name]struct{} // once descended: of all names
}

// A Skipped entry is a key or an address that a push held and no table can.
type Skipped struct {
	Key    string `json:"key"`
	Reason string `json:"reason"`
}

// A Collision is a name that two entries of a push claim. A host below a
// wildcard of another entry is not one: the exact name is meant to win.
type Collision struct {
	Name   string `json:"name"`
	Winner string `json:"winner"`
	Loser  string `json:"loser"`
}

// Len is the number of hosts, wildcards included.
func (t *Table) Len() int { return t.hosts + t.wildcards }

// Skipped lists what was left out of the table, sorted by key.
func (t *Table) Skipped() []Skipped {
	var skipped []Skipped
	for i := range t.shards {
		skipped = append(skipped, t.shards[i].skipped...)
	}
	slices.SortFunc(skipped, compareSkipped)
	return skipped
}

// Collisions lists the names that two entries claim, sorted by name. They are found
// when first asked for, since that takes longer than a small push.
func (t *Table) Collisions() []Collision {
	t.settled.Do(t.findCollisions)
	return slices.Clone(t.collisions)
}

// all yields the hosts, wildcards included.
func (t *Table) all(yield func(host) bool) {
	for i := range t.shards {
		for h := range t.shards[i].all {
			if !yield(h) {
				return
			}
		}
	}
}

// find returns the host whose name is name.
func (t *Table) find(name wire.Name) (host, bool) {
	hash := maphash.String(t.seed, string(name))
	return t.shards[shardOf(hash)].find(hash, name)
}

// A Rule names the rule by which a name is the table's, or that it is not. Its
// text is the stable name for people, logs and metrics.
type Rule string

// The rules in their order of precedence.
const (
	RuleExact     Rule = "exact"     // the host's FQDN
	RuleWildcard  Rule = "wildcard"  // below a *.suffix
	RuleShortName Rule = "shortname" // name, name.namespace, name.namespace.svc, alternative names
	RuleAutopath  Rule = "autopath"  // one of the above and a search domain
	RulePTR       Rule = "ptr"       // the PTR name of a host's address
	RuleNone      Rule = "none"      // not the table's
)

// A match is what the table knows of a name. It is good for as long as that and the
// scratch of the lookup.
type match struct {
	rule Rule
	host host // of all rules but RuleNone and RulePTR
	// base is the rule that found the name below the search domain, for
	// RuleAutopath; target is that name, and searched the domain.
	base             Rule
	target, searched wire.Name
	// ptr lists the FQDNs, sorted, for RulePTR.
	ptr []wire.Name
	// bypassed says, for RuleNone, that the name is that of a host which settings leave
	// to nameservers.
	bypassed bool
}

// owner returns the name that has the addresses of an own name: that itself, or the
// CNAME's target of an autopath name.
func (m *match) owner(name wire.Name) wire.Name {
	switch {
	case m.rule != RuleAutopath:
		return name
	case m.base == RuleShortName:
		return m.host.name
	default:
		return m.target
	}
}

// A scratch is what one lookup at a time puts names together in.
type scratch struct {
	name [wire.MaxNameLen]byte
	ptr  []wire.Name
}

// join puts two parts of a name together. ok is false if the name is too long.
func (s *scratch) join(head, tail wire.Name) (name wire.Name, ok bool) {
	if len(head)+len(tail) > wire.MaxNameLen {
		return "", false
	}
	n := copy(s.name[:], head)
	n += copy(s.name[n:], tail)
	return wire.Name(viewString(s.name[:n])), true
}

// lookup finds an own name that settings do not leave to nameservers. search is the
// client's search list, in its order.
func (t *Table) lookup(name wire.Name, search []wire.Name, settings *suffixRules, s *scratch) match {
	none := match{rule: RuleNone}
	if name.Special() {
		return none
	}
	if m := t.direct(name, s); m.rule != RuleNone {
		if !settings.bypasses(name) && !settings.bypassesHost(&m.host) {
			return m
		}
		none.bypassed = true
	}
	for _, domain := range search {
		target, ok := name.CutSuffix(domain)
		if !ok || target.Special() {
			continue
		}
		if m := t.direct(target, s); m.rule != RuleNone {
			if !settings.bypasses(target) && !settings.bypassesHost(&m.host) {
				return match{rule: RuleAutopath, host: m.host, base: m.rule, target: target, searched: domain}
			}
			none.bypassed = true
		}
	}
	return none
}

// direct finds a name that is a host's without regard to the search list.
func (t *Table) direct(name wire.Name, s *scratch) match {
	if h, ok := t.find(name); ok && !h.wildcard() {
		return match{rule: RuleExact, host: h}
	}
	if h, ok := t.wildcard(name, s); ok {
		return match{rule: RuleWildcard, host: h}
	}
	if h, ok := t.shortName(name, s); ok {
		return match{rule: RuleShortName, host: h}
	}
	return match{rule: RuleNone}
}

// wildcard returns the host of the longest suffix that name is below.
func (t *Table) wildcard(name wire.Name, s *scratch) (host, bool) {
	if t.wildcards == 0 || name == wire.Root {
		return host{}, false
	}
	for suffix := name.Parent(); suffix != wire.Root; suffix = suffix.Parent() {
		if starred, ok := s.join(wire.WildcardLabel, suffix); ok {
			if h, ok := t.find(starred); ok {
				return h, true
			}
		}
	}
	return host{}, false
}

// shortName returns the host that name is a short or alternative name of. The
// order is that of precedence: name.namespace, name.namespace.svc, name in the own
// namespace, names that cannot be derived.
func (t *Table) shortName(name wire.Name, s *scratch) (host, bool) {
	c := &t.cluster
	if h, ok := t.derived(name, c.services, s); ok {
		return h, true
	}
	if name.Below(svcName) {
		if h, ok := t.derived(name, c.domain, s); ok {
			return h, true
		}
	}
	if c.own != wire.Root {
		if h, ok := t.derived(name, c.own, s); ok {
			return h, true
		}
	}
	if fqdn, ok := t.aliases[name]; ok {
		return t.find(fqdn)
	}
	return host{}, false
}

// derived returns the host whose FQDN is name followed by suffix, if its short
// names are heads of its FQDN.
func (t *Table) derived(name, suffix wire.Name, s *scratch) (host, bool) {
	fqdn, ok := s.join(name, suffix)
	if !ok {
		return host{}, false
	}
	h, ok := t.find(fqdn)
	return h, ok && h.derived()
}

// owner returns the host that answers name without a wildcard's help.
func (t *Table) owner(name wire.Name, s *scratch) (host, bool) {
	if h, ok := t.find(name); ok {
		return h, true
	}
	return t.shortName(name, s)
}

// settleAliases gives the names that cannot be derived to those who claim them, the
// first by key first, and tells lost of each claim that goes to another.
func (t *Table) settleAliases(lost func(c claim, winner host)) map[wire.Name]wire.Name {
	var claims []claim
	for i := range t.shards {
		claims = append(claims, t.shards[i].claims...)
	}
	if len(claims) == 0 {
		return nil
	}
	slices.SortStableFunc(claims, func(x, y claim) int { return cmp.Compare(x.key, y.key) })
	// The claims are settled one by one, each with those before it in effect.
	settling := &Table{cluster: t.cluster, seed: t.seed, shards: t.shards, aliases: map[wire.Name]wire.Name{}}
	var s scratch
	for _, c := range claims {
		switch winner, taken := settling.owner(c.name, &s); {
		case !taken:
			settling.aliases[c.name] = c.fqdn
		case winner.name != c.fqdn && lost != nil:
			lost(c, winner)
		}
	}
	return settling.aliases
}

// findCollisions fills collisions.
func (t *Table) findCollisions() {
	var found []Collision
	for i := range t.shards {
		found = append(found, t.shards[i].collisions...)
	}
	t.settleAliases(func(c claim, winner host) {
		found = append(found, collision(c.name, winner.info(&t.cluster).key, c.key))
	})
	var s scratch
	var heads [3]wire.Name
	for h := range t.all {
		if !h.derived() {
			continue
		}
		for _, name := range t.cluster.heads(h.name, heads[:0]) {
			if winner, _ := t.owner(name, &s); winner.name != h.name && !name.Special() {
				found = append(found, collision(name, winner.info(&t.cluster).key, h.info(&t.cluster).key))
			}
		}
	}
	slices.SortFunc(found, func(x, y Collision) int {
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.Winner, y.Winner), cmp.Compare(x.Loser, y.Loser))
	})
	t.collisions = slices.Compact(found)
}
