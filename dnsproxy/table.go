package dnsproxy

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/miekg/dns"
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
	v4, v6    []byte // packed addresses, sorted, without duplicates
	wildcard  bool
	local     bool // of this cluster's Kubernetes: it has short names
	derived   bool // and they can be derived from its FQDN
}

// registryKubernetes is the NameInfo.registry of a Service.
const registryKubernetes = "Kubernetes"

func (h *host) kubernetes() bool { return h.registry == registryKubernetes }

// addresses yields the addresses of both families, IPv4 first.
func (h *host) addresses() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for v4 := range slices.Chunk(h.v4, addressLen(dns.TypeA)) {
			if !yield(netip.AddrFrom4([4]byte(v4))) {
				return
			}
		}
		for v6 := range slices.Chunk(h.v6, addressLen(dns.TypeAAAA)) {
			if !yield(netip.AddrFrom16([16]byte(v6))) {
				return
			}
		}
	}
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

// A match is what the table knows of a name. It is good for as long as that.
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

// A nameBuffer is room to put names together in, for one lookup at a time.
type nameBuffer [maxNameLen]byte

// lookup finds an own name. search is the client's search list, in its order.
func (t *Table) lookup(name wireName, search []wireName, scratch *nameBuffer) match {
	if name.special() {
		return match{rule: RuleNone}
	}
	if m := t.direct(name, scratch); m.rule != RuleNone {
		return m
	}
	for _, domain := range search {
		target, ok := name.cutSuffix(domain)
		if !ok || target.special() {
			continue
		}
		if m := t.direct(target, scratch); m.rule != RuleNone {
			return match{rule: RuleAutopath, host: m.host, base: m.rule, target: target, searched: domain}
		}
	}
	return match{rule: RuleNone}
}

// direct finds a name that is a host's without regard to the search list.
func (t *Table) direct(name wireName, scratch *nameBuffer) match {
	if h := t.hosts[name]; h != nil {
		return match{rule: RuleExact, host: h}
	}
	if h := t.wildcard(name); h != nil {
		return match{rule: RuleWildcard, host: h}
	}
	if h := t.shortName(name, scratch); h != nil {
		return match{rule: RuleShortName, host: h}
	}
	return match{rule: RuleNone}
}

// wildcard returns the host of the longest suffix that name is below.
func (t *Table) wildcard(name wireName) *host {
	if len(t.wildcards) == 0 || name == rootName {
		return nil
	}
	for suffix := name.parent(); suffix != rootName; suffix = suffix.parent() {
		if h := t.wildcards[suffix]; h != nil {
			return h
		}
	}
	return nil
}

// shortName returns the host that name is a short or alternative name of. The
// order is that of precedence: name.namespace, name.namespace.svc, name in the own
// namespace, names that cannot be derived.
func (t *Table) shortName(name wireName, scratch *nameBuffer) *host {
	c := &t.cluster
	if h := t.derived(name, c.services, scratch); h != nil {
		return h
	}
	if name.below(svcName) {
		if h := t.derived(name, c.domain, scratch); h != nil {
			return h
		}
	}
	if c.own != rootName {
		if h := t.derived(name, c.own, scratch); h != nil {
			return h
		}
	}
	return t.aliases[name]
}

// derived returns the host whose FQDN is name followed by suffix, if its short
// names are heads of its FQDN.
func (t *Table) derived(name, suffix wireName, scratch *nameBuffer) *host {
	if len(name)+len(suffix) > maxNameLen {
		return nil
	}
	n := copy(scratch[:], name)
	n += copy(scratch[n:], suffix)
	if h := t.hosts[wireName(scratch[:n])]; h != nil && h.derived {
		return h
	}
	return nil
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
