package table

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Table is an immutable set of mesh hosts, made by [New], [Empty] or [Table.With]. Its
// methods are safe for concurrent use.
type Table struct {
	Cluster Cluster
	seed    maphash.Seed // shared with the previous and the next tables
	shards  [digest.Count]shard
	reverse reverseIndex
	// claimed are the names that cannot be derived from a host's FQDN; nil without any.
	claimed *claimed
	counts

	ancestors *ancestors // of all names; nil unless it follows from a table of WithAncestors

	settled    sync.Once
	collisions []Collision // set by settled
}

// A Skipped is a key or an address of a push that is not valid, and why.
type Skipped struct {
	Key    string `json:"key"`
	Reason string `json:"reason"`
}

// A Collision is a name that two entries of a push claim. A host below the wildcard of
// another entry is not a collision: the exact name wins by design.
type Collision struct {
	Name   string `json:"name"`
	Winner string `json:"winner"`
	Loser  string `json:"loser"`
}

// Len returns the number of hosts, including wildcards.
func (t *Table) Len() int { return int(t.hosts + t.wildcards) }

// Skipped returns what was left out of the table, sorted by key.
func (t *Table) Skipped() []Skipped {
	var skipped []Skipped
	for i := range t.shards {
		skipped = append(skipped, t.shards[i].skipped...)
	}
	sortSkipped(skipped)
	return skipped
}

// Collisions returns the names that two entries claim, sorted by name. The first call finds
// them, which takes longer than a small push.
func (t *Table) Collisions() []Collision {
	t.settled.Do(t.findCollisions)
	return slices.Clone(t.collisions)
}

// all yields the hosts, including wildcards.
func (t *Table) all(yield func(Host) bool) {
	for i := range t.shards {
		for h := range t.shards[i].all {
			if !yield(h) {
				return
			}
		}
	}
}

// find returns the host with this name.
func (t *Table) find(name wire.Name) (Host, bool) {
	s := &t.shards[digest.ShardOfWire(string(name))]
	if len(s.index) == 0 {
		return Host{}, false
	}
	return s.find(maphash.String(t.seed, string(name)), name)
}

// A Rule is the rule by which the table has a name, or RuleNone. Its text does not change
// between versions: it is in logs, metrics and JSON.
type Rule string

// The rules in their order of precedence.
const (
	RuleExact     Rule = "exact"     // the host's FQDN
	RuleEndpoint  Rule = "endpoint"  // an endpoint of a headless Service, by its address, before a name of the Service
	RulePort      Rule = "port"      // a port of a Service, before a name of the Service
	RuleWildcard  Rule = "wildcard"  // below a *.suffix
	RuleShortName Rule = "shortname" // name, name.namespace, name.namespace.svc, alternative names
	RuleAutopath  Rule = "autopath"  // one of the above, followed by a domain of the search list
	RulePTR       Rule = "ptr"       // the PTR name of a host's address
	RuleNone      Rule = "none"      // the table does not have it
)

// A Match is the result of a lookup. It is valid as long as the name, the table and the
// Scratch of the lookup.
type Match struct {
	Rule Rule
	// Host is the host of all rules but RuleNone and RulePTR. For RuleEndpoint it is the headless
	// Service, with the address of the endpoint alone.
	Host Host
	// Short is true if the host was found by a short name. For RuleEndpoint and RulePort,
	// Prefix has the labels before the name of the host.
	Short  bool
	Prefix wire.Name
	// For RuleAutopath: Target is the target of the CNAME record, Base the rule that found the
	// name without the search domain, Searched the domain. The target is an FQDN if Short is
	// set, otherwise the name without the search domain.
	Base             Rule
	Target, Searched wire.Name
	// ptr lists the FQDNs, sorted, for RulePTR.
	Pointers []wire.Name
	// Bypassed says, for RuleNone, that the table has the name and the settings have it
	// forwarded.
	Bypassed bool
}

// BaseRule returns the rule by which the table has the name, or for RuleAutopath the name without
// the search domain.
func (m *Match) BaseRule() Rule {
	if m.Rule == RuleAutopath {
		return m.Base
	}
	return m.Rule
}

// Alias returns the host of which the host of the answer for name is an alias; the root if
// that host is no alias. A CNAME record to a name that the answer already has would make a loop.
func (m *Match) Alias(name wire.Name) wire.Name {
	if !m.Host.isAlias() {
		return wire.Root
	}
	return m.aliasUnlessLoop(name)
}

func (m *Match) aliasUnlessLoop(name wire.Name) wire.Name {
	if alias := m.Host.Alias(); alias != name && alias != m.Target {
		return alias
	}
	return wire.Root
}

// Owner returns the owner name of the address records in the answer for name: name itself,
// or the target of the last CNAME record.
func (m *Match) Owner(name wire.Name) wire.Name {
	if alias := m.Alias(name); alias != wire.Root {
		return alias
	}
	if m.Rule == RuleAutopath {
		return m.Target
	}
	return name
}

// Aliased returns the match whose records answer queries for name: if the host of m is an alias of
// a host in the table, that host's match, otherwise m itself.
func (t *Table) Aliased(m *Match, name wire.Name) *Match {
	alias := m.Alias(name)
	if alias == wire.Root || alias.Special() {
		return m
	}
	aliased := new(Match)
	if !t.direct(aliased, alias, new(Scratch)) || aliased.Short || aliased.Host.isAlias() {
		return m
	}
	return aliased
}

// A Scratch is the buffer of one lookup at a time. The zero value is ready for use.
type Scratch struct {
	name     [wire.MaxNameLen]byte
	ptr      []wire.Name
	services []wire.Name
	dashed   []byte
}

// join concatenates two parts of a name. It reports false if the name is too long.
func (s *Scratch) join(head, tail wire.Name) (name wire.Name, ok bool) {
	if len(head)+len(tail) > wire.MaxNameLen {
		return "", false
	}
	n := copy(s.name[:], head)
	n += copy(s.name[n:], tail)
	return wire.Name(viewString(s.name[:n])), true
}

// Lookup finds the host that answers name, unless suffixes give it to the nameservers.
// search is the client's search list, in its order; empty if names are not to be expanded.
func (t *Table) Lookup(name wire.Name, search []wire.Name, suffixes *Suffixes, s *Scratch) (m Match) {
	m.Rule = RuleNone
	if name.Special() {
		return m
	}
	if t.direct(&m, name, s) {
		if !suffixes.Bypasses(name) && !suffixes.bypassesHost(&m.Host) {
			return m
		}
		m = Match{Rule: RuleNone, Bypassed: true}
	}
	for _, domain := range search {
		target, ok := name.CutSuffix(domain)
		if !ok || target.Special() || !t.direct(&m, target, s) {
			continue
		}
		if !suffixes.Bypasses(target) && !suffixes.bypassesHost(&m.Host) {
			m.Base, m.Rule, m.Searched, m.Target = m.Rule, RuleAutopath, domain, target
			switch {
			case !m.Short:
			case m.Prefix == wire.Root:
				m.Target = m.Host.Name
			default:
				m.Target, _ = s.join(m.Prefix, m.Host.Name)
			}
			return m
		}
		m = Match{Rule: RuleNone, Bypassed: true}
	}
	return m
}

// direct is Lookup without search list and suffixes. It reports false, and leaves m as it is, if
// the table does not have the name.
func (t *Table) direct(m *Match, name wire.Name, s *Scratch) bool {
	if h, ok := t.find(name); ok && !h.wildcard() {
		m.Rule, m.Host = RuleExact, h
		return true
	}
	maybePart := t.headless+t.ported > 0 && isPart(name)
	if maybePart && t.part(m, name, false, s) {
		return true // before wildcards: the name exists (RFC 4592, section 3.3.1)
	}
	if h, ok := t.wildcard(name, s); ok {
		m.Rule, m.Host = RuleWildcard, h
		return true
	}
	if h, ok := t.shortName(name, s); ok {
		m.Rule, m.Host, m.Short = RuleShortName, h, true
		return true
	}
	return maybePart && t.part(m, name, true, s)
}

// wildcard returns the wildcard with the longest suffix that name is below.
func (t *Table) wildcard(name wire.Name, s *Scratch) (Host, bool) {
	if t.wildcards == 0 || name == wire.Root {
		return Host{}, false
	}
	for suffix := name.Parent(); suffix != wire.Root; suffix = suffix.Parent() {
		if starred, ok := s.join(wire.WildcardLabel, suffix); ok {
			if h, ok := t.find(starred); ok {
				return h, true
			}
		}
	}
	return Host{}, false
}

// shortName returns the host that has name as a short or alternative name. In order of
// precedence: name.namespace, name.namespace.svc, name in the agent's namespace, names
// that cannot be derived.
func (t *Table) shortName(name wire.Name, s *Scratch) (Host, bool) {
	c := &t.Cluster
	if h, ok := t.derived(name, c.services, s); ok {
		return h, true
	}
	if name.Below(svcName) {
		if h, ok := t.derived(name, c.Domain, s); ok {
			return h, true
		}
	}
	if c.own != wire.Root {
		if h, ok := t.derived(name, c.own, s); ok {
			return h, true
		}
	}
	if fqdn, ok := t.claimed.find(name); ok {
		return t.find(fqdn)
	}
	return Host{}, false
}

// derived returns the host whose FQDN is name followed by suffix, if its short names can be
// derived from its FQDN.
func (t *Table) derived(name, suffix wire.Name, s *Scratch) (Host, bool) {
	fqdn, ok := s.join(name, suffix)
	if !ok {
		return Host{}, false
	}
	h, ok := t.find(fqdn)
	return h, ok && h.derived()
}

// owner returns the host with name as its FQDN, short or alternative name.
func (t *Table) owner(name wire.Name, s *Scratch) (Host, bool) {
	if h, ok := t.find(name); ok {
		return h, true
	}
	return t.shortName(name, s)
}

// isPart reports whether name may be the name of a part of a host: of a port or an endpoint. It
// decides for most names, and costs little.
func isPart(name wire.Name) bool {
	return name != wire.Root && (name[1] == '_' || strings.Count(name.FirstLabel(), "-") >= minDashes)
}

// part finds the part of a host that has name, before the FQDN of the host or, with short, before a
// short name. isPart must have reported true. Without a part it leaves m as it is.
func (t *Table) part(m *Match, name wire.Name, short bool, s *Scratch) bool {
	part := Match{Short: short}
	if name[1] == '_' {
		if !t.port(&part, name, s) {
			return false
		}
	} else if !t.endpoint(&part, name, s) {
		return false
	}
	*m = part
	return true
}

// findWhole sets the host of a match: the one with this FQDN or, if m.Short is set, with this
// short name. It reports false if there is none, or if its FQDN leaves no room for the prefix.
func (t *Table) findWhole(m *Match, name wire.Name, s *Scratch) (found bool) {
	m.Host, found = t.find(name)
	if m.Short {
		if found {
			return false // not a short name: it is the FQDN of another host
		}
		m.Host, found = t.shortName(name, s)
	}
	return found && len(m.Prefix)+len(m.Host.Name) <= wire.MaxNameLen
}
