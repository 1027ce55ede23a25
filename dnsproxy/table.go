package dnsproxy

import (
	"net/netip"
	"slices"
)

// A Table is an immutable set of mesh hosts. Build one with [NewTable]; its
// methods may be called from any goroutine.
type Table struct {
	cluster cluster
	// hosts by their FQDN, wildcards by their suffix.
	hosts, wildcards map[wireName]*host
	// aliases are the short names that cannot be derived when asked: alternative
	// names, and short names that are not the head of their host's FQDN.
	aliases map[wireName]*host
	// reverse lists the FQDNs of the hosts that have an address, sorted.
	reverse map[netip.Addr][]wireName

	skipped    []Skipped
	collisions []Collision
}

// A host is one entry of a table. It never changes.
type host struct {
	key       string   // as the control plane wrote it
	name      wireName // the FQDN, or a wildcard's suffix
	registry  string
	shortname string
	namespace string
	v4, v6    []netip.Addr // sorted, without duplicates
	wildcard  bool
	local     bool // of this cluster's Kubernetes: it has short names
	derived   bool // and they can be derived from its FQDN
}

// registryKubernetes is the NameInfo.registry of a Service.
const registryKubernetes = "Kubernetes"

func (h *host) kubernetes() bool { return h.registry == registryKubernetes }

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
func (t *Table) Len() int { return len(t.hosts) + len(t.wildcards) }

// Skipped lists what was left out of the table, sorted by key.
func (t *Table) Skipped() []Skipped { return slices.Clone(t.skipped) }

// Collisions lists the names that two entries claim, sorted by name.
func (t *Table) Collisions() []Collision { return slices.Clone(t.collisions) }

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

// A match is what the table knows of a name.
type match struct {
	rule Rule
	host *host // nil for RuleNone and RulePTR
	// base is the rule that found the name below the search domain, for
	// RuleAutopath; target is that name, and searched the domain.
	base             Rule
	target, searched wireName
	// ptr lists the FQDNs, sorted, for RulePTR. It is the table's: read only.
	ptr []wireName
}

// lookup finds an own name. search is the client's search list, in its order.
func (t *Table) lookup(name wireName, search []wireName) match {
	if name.special() {
		return match{rule: RuleNone}
	}
	if m := t.direct(name); m.rule != RuleNone {
		return m
	}
	for _, domain := range search {
		target, ok := name.cutSuffix(domain)
		if !ok || target.special() {
			continue
		}
		if m := t.direct(target); m.rule != RuleNone {
			return match{rule: RuleAutopath, host: m.host, base: m.rule, target: target, searched: domain}
		}
	}
	return match{rule: RuleNone}
}

// direct finds a name that is a host's without regard to the search list.
func (t *Table) direct(name wireName) match {
	if h := t.hosts[name]; h != nil {
		return match{rule: RuleExact, host: h}
	}
	if h := t.wildcard(name); h != nil {
		return match{rule: RuleWildcard, host: h}
	}
	if h := t.shortName(name); h != nil {
		return match{rule: RuleShortName, host: h}
	}
	return match{rule: RuleNone}
}

// wildcard returns the host of the longest suffix that name is below.
func (t *Table) wildcard(name wireName) *host {
	if len(t.wildcards) == 0 {
		return nil
	}
	for suffix := name.parent(); suffix != "" && suffix != rootName; suffix = suffix.parent() {
		if h := t.wildcards[suffix]; h != nil {
			return h
		}
	}
	return nil
}

// shortName returns the host that name is a short or alternative name of.
func (t *Table) shortName(name wireName) *host {
	for fqdn := range t.cluster.expansions(name) {
		if h := t.hosts[fqdn]; h != nil && h.derived {
			return h
		}
	}
	return t.aliases[name]
}

// pointer finds the hosts of the address that name is the PTR name of.
func (t *Table) pointer(name wireName) match {
	if addr, ok := reverseAddr(name); ok {
		if names := t.reverse[addr.Unmap()]; len(names) > 0 {
			return match{rule: RulePTR, ptr: names}
		}
	}
	return match{rule: RuleNone}
}
