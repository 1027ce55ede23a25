package table

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Table is an immutable set of mesh hosts, made by [New], [Empty] or [Table.With]. Its
// methods are safe for concurrent use.
type Table struct {
	hostSet
	reverse reverseIndex
	// claimed are the names that cannot be derived from a host's FQDN; nil if there are none.
	claimed *claimedNames

	ancestors *ancestors // nil unless this table, or a table from which it was made, was made by WithAncestors

	collisionsOnce sync.Once   // calls findCollisions
	collisions     []Collision // set by findCollisions
}

// Len returns the number of hosts, including wildcards.
func (t *Table) Len() int { return int(t.hosts + t.wildcards) }

// Lookup finds the host with the name of a question. It finds none if the name or the host is bypassed according to
// suffixes. search is the client's search list. If name ends in one of these domains, Lookup also looks for the name
// without this domain (autopath). The first domain with which it finds a host wins.
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
			m.Base, m.Rule, m.Searched = m.Rule, RuleAutopath, domain
			if !m.Short {
				m.Target = target
			}
			return m
		}
		m = Match{Rule: RuleNone, Bypassed: true}
	}
	return m
}

// direct is like Lookup, but without a search list and without suffixes. If the table does not have the name, direct
// reports false and does not change m.
func (t *Table) direct(m *Match, name wire.Name, s *Scratch) bool {
	if h, ok := t.find(name); ok && !h.wildcard() {
		m.Rule, m.Host = RuleExact, h
		return true
	}
	maybePart := t.headless+t.ported > 0 && isPart(name)
	if maybePart && t.part(m, name, false, s) {
		return true // this comes before wildcards, because the name exists (RFC 4592, section 3.3.1)
	}
	if h, ok := t.wildcard(name, s); ok {
		m.Rule, m.Host = RuleWildcard, h
		return true
	}
	if h, ok := t.shortName(name, s); ok {
		m.Rule, m.Host, m.Short, m.Target = RuleShortName, h, true, h.Name
		return true
	}
	if maybePart && t.part(m, name, true, s) {
		m.Target, _ = s.join(m.Prefix, m.Host.Name)
		return true
	}
	return false
}

// wildcard returns the wildcard that applies to name. If there are several, it is the one with the longest suffix.
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

// shortName returns the host that has name as a short or alternative name. The forms of such names are, in order of
// precedence: name.namespace, name.namespace.svc, name in the agent's namespace, and names
// that cannot be derived from an FQDN.
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
	if c.ownNamespace != wire.Root {
		if h, ok := t.derived(name, c.ownNamespace, s); ok {
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

// isPart reports whether name may be the name of a part of a host, which is a port or an endpoint. It
// takes little time, and reports false for most names.
func isPart(name wire.Name) bool {
	return name != wire.Root && (name[1] == '_' || strings.Count(name.FirstLabel(), "-") >= minDashes)
}

// part finds the port or endpoint that has name, and sets m to it. name consists of the labels of the part, followed by
// the FQDN of the host or, if byShortName is true, by a short name of the host. isPart must have reported true. If
// there is no such part, the method part reports false and does not change m.
func (t *Table) part(m *Match, name wire.Name, byShortName bool, s *Scratch) bool {
	part := Match{Short: byShortName}
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

// port finds the port that has name, and sets m to it. name is _name._protocol, followed by the FQDN of a Service
// or, if m.Short is set, by a short name. port reports false if there is no such port.
func (t *Table) port(m *Match, name wire.Name, s *Scratch) (found bool) {
	rest := name.Parent()
	if t.ported == 0 || rest == wire.Root || rest.Parent() == wire.Root || rest[1] != '_' {
		return false
	}
	m.Rule, m.Prefix = RulePort, name[:len(name)-len(rest.Parent())]
	if !t.findWhole(m, rest.Parent(), s) {
		return false
	}
	for p := range m.Host.ports {
		found = found || p.hasName(m.Prefix)
	}
	return found
}

// endpoint finds the endpoint of a headless Service that has name, and sets m to it. name is a label with the
// endpoint's address, followed by the FQDN of the Service or, if m.Short is set, by a short name. If an endpoint has
// the host name of a pod, it has no name of this form. endpoint reports false if there is no such endpoint.
func (t *Table) endpoint(m *Match, name wire.Name, s *Scratch) bool {
	parent := name.Parent()
	if t.headless == 0 || parent == wire.Root {
		return false
	}
	addr, ok := parseDashed(name.FirstLabel(), s)
	if !ok {
		return false
	}
	m.Rule, m.Prefix = RuleEndpoint, name[:len(name)-len(parent)]
	return t.findWhole(m, parent, s) && m.Host.headless() && t.narrow(&m.Host, addr)
}

// findWhole sets m.Host to the host that has name as its FQDN or, if m.Short is set, as a short name. It reports
// false if there is no such host, or if m.Prefix followed by its FQDN is too long for a name.
func (t *Table) findWhole(m *Match, name wire.Name, s *Scratch) (found bool) {
	m.Host, found = t.find(name)
	if m.Short {
		if found {
			return false // name is an FQDN, and not a short name
		}
		m.Host, found = t.shortName(name, s)
	}
	return found && len(m.Prefix)+len(m.Host.Name) <= wire.MaxNameLen
}

// narrow removes all addresses except addr from h, which is a headless Service. It reports false if h does
// not have addr, or if an endpoint with addr has the host name of a pod.
func (t *Table) narrow(h *Host, addr netip.Addr) bool {
	bytes := addr.As16()
	one := h.find(bytes[len(bytes)-addr.BitLen()/8:])
	if one == nil || t.hasPod(h.Name, one) {
		return false
	}
	if h.V4, h.V6, h.near = nil, nil, [2]uint32{}; addr.Is6() {
		h.V6 = one
	} else {
		h.V4 = one
	}
	return true
}

// hasPod reports whether a headless Service has a pod with a host name and this packed address.
func (t *Table) hasPod(service wire.Name, packed []byte) bool {
	found := false
	t.pods(service, packed, func(Host) bool {
		found = true
		return false
	})
	return found
}

// Aliased returns the match whose records answer queries for name. m is the match of name. If its host is an alias of
// another host in the table, the result is the match of the other host, otherwise m.
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

// Pointer finds the hosts for a PTR query. name is the PTR name of an address, and the hosts are those that have this
// address. Pointer leaves out hosts that are bypassed according to suffixes.
func (t *Table) Pointer(name wire.Name, suffixes *Suffixes, s *Scratch) Match {
	addr, ok := wire.ReverseAddr(name)
	if !ok {
		return Match{Rule: RuleNone}
	}
	var names []wire.Name
	if addr = addr.Unmap(); addr.Is4() {
		packed := addr.As4()
		names = t.pointers(packed[:], s)
	} else {
		packed := addr.As16()
		names = t.pointers(packed[:], s)
	}
	known := len(names) > 0
	names = suffixes.withoutBypassed(names)
	if len(names) == 0 {
		return Match{Rule: RuleNone, Bypassed: known}
	}
	return Match{Rule: RulePTR, Pointers: names}
}

// pointers returns the FQDNs of the hosts that have a packed address, sorted as text, and at most maxPointers of
// them. If there are more, it prefers Services. The result is stored in s.
//
// For a headless Service, the result has the name of the endpoint with this address instead. If pods with host names
// have the address, these are the names of the pods. Otherwise it is a label with the address, followed by the name
// of the Service. Services below the cluster domain, and Services outside of it such as ServiceImports, may both
// have the address. pointers decides separately for these two groups whether pods have it.
func (t *Table) pointers(packed []byte, s *Scratch) []wire.Name {
	s.ptr, s.services, s.dashed = s.ptr[:0], s.services[:0], s.dashed[:0]
	n := 0
	t.hostsWith(packed, func(h Host) bool {
		switch {
		case h.wildcard(): // a wildcard has no FQDN that could be a PTR record's target
		case h.headless():
			s.services = append(s.services, h.Name)
		default:
			s.ptr = append(s.ptr, h.Name)
		}
		n++
		return len(s.services)+len(s.ptr) < maxPointers && n < maxPointersLookedAt
	})
	var havePods [2]bool // indexed by the result of the method side
	for _, service := range s.services {
		t.pods(service, packed, func(pod Host) bool {
			havePods[t.side(service)] = true
			s.ptr = append(s.ptr, pod.Name)
			return len(s.ptr) < maxPointers
		})
	}
	for _, service := range s.services {
		if havePods[t.side(service)] {
			continue
		}
		start := len(s.dashed)
		if s.dashed = append(appendDashed(s.dashed, packed), service...); len(s.dashed)-start <= wire.MaxNameLen {
			s.ptr = append(s.ptr, wire.Name(viewString(s.dashed[start:])))
		}
	}
	slices.SortFunc(s.ptr, wire.Name.CompareText)
	s.ptr = slices.Compact(s.ptr)
	s.ptr = s.ptr[:min(len(s.ptr), maxPointers)]
	return s.ptr
}

// side returns 1 for a name below the cluster domain, otherwise 0.
func (t *Table) side(name wire.Name) int {
	if name.Below(t.Cluster.Domain) {
		return 1
	}
	return 0
}

// HostsAt calls yield for each host that has an address. It includes wildcards, and leaves out aliases.
func (t *Table) HostsAt(addr netip.Addr, yield func(Host)) {
	visit := func(h Host) bool {
		yield(h)
		return true
	}
	if addr = addr.Unmap(); addr.Is4() {
		packed := addr.As4()
		t.hostsWith(packed[:], visit)
		return
	}
	packed := addr.As16()
	t.hostsWith(packed[:], visit)
}

// hostsWith calls yield for the hosts with a packed address, Services first, until yield returns false.
func (t *Table) hostsWith(packed []byte, yield func(Host) bool) {
	t.hostsAtKey(maphash.Bytes(t.seed, packed), packed, yield)
}

// pods calls yield for the pods of a headless Service that have a packed address, until yield returns false.
func (t *Table) pods(service wire.Name, packed []byte, yield func(Host) bool) {
	t.hostsAtKey(podKey(t.seed, service, packed), packed, func(h Host) bool { return !h.podOf(service) || yield(h) })
}

// hostsAtKey calls yield for the hosts that have a packed address and that the reverse index has for a key, until yield
// returns false. key is the hash of the key.
func (t *Table) hostsAtKey(key uint64, packed []byte, yield func(Host) bool) {
	tag := keyTag(key)
	all := t.reverse[partOf(key)]
	first, _ := slices.BinarySearch(all, tag)
	for _, p := range all[first:] {
		if p>>pointerTagShift != tag>>pointerTagShift {
			break
		}
		at := &t.shards[p>>pointerNameBits&(digest.Count-1)]
		if !at.hostsWith(packed, t.seed, uint32(p), yield) { //nolint:gosec // the low half
			break
		}
	}
}

// HasBelow reports whether there is a name below name: the name of a host, of a wildcard or of a port, or a short name.
// Then name exists, but has no records (RFC 8020, RFC 4592). HasBelow walks all hosts, unless the table was made by
// [Table.WithAncestors], or from such a table.
func (t *Table) HasBelow(name wire.Name) bool {
	known := t.ancestors
	if known == nil {
		known = newAncestors(&t.hostSet)
	}
	return known.has(name, t.seed) || t.claimed.hasBelow(name) || t.hasPortBelow(name)
}

// hasPortBelow reports whether name is _protocol followed by the FQDN or a short name of a Service
// that has named ports of that protocol. Such a name exists without records.
func (t *Table) hasPortBelow(name wire.Name) bool {
	label := name.FirstLabel()
	if t.ported == 0 || len(label) < 2 || label[0] != '_' {
		return false
	}
	var m Match
	if !t.direct(&m, name.Parent(), new(Scratch)) || m.Rule != RuleExact && m.Rule != RuleShortName {
		return false
	}
	for p := range m.Host.ports {
		if p.name != "" && strings.EqualFold(label[1:], p.protocol.String()) {
			return true
		}
	}
	return false
}

// WithAncestors returns a table with the same hosts as t, whose HasBelow is as fast as a lookup. HasBelow is as fast
// in all tables that are made from the result.
func (t *Table) WithAncestors() *Table {
	if t.ancestors != nil {
		return t
	}
	return &Table{hostSet: t.hostSet, reverse: t.reverse, claimed: t.claimed, ancestors: newAncestors(&t.hostSet)}
}

// Domains returns the domains that the hosts outside of the cluster domain are in. The domain of a host is its own
// name, and the domain of a wildcard is its suffix. If a domain is below another one, Domains leaves it out. So each
// host outside of the cluster domain is at or below one of the domains. The domains come in no particular order,
// without duplicates.
//
// The fingerprint depends on the names of all hosts. If one of two tables was made from the other by [Table.With],
// and they have the same names, they have the same fingerprint.
func (t *Table) Domains() (domains []wire.Name, fingerprint uint64) {
	var s Scratch
	for h := range t.all {
		fingerprint ^= maphash.String(t.seed, string(h.Name))
		name := h.Name
		if h.wildcard() {
			name = name.Parent()
		}
		if name != wire.Root && !name.Below(t.Cluster.Domain) && !t.hasAbove(name, h.wildcard(), &s) {
			domains = append(domains, name)
		}
	}
	return domains, fingerprint
}

// hasAbove reports whether name is below the domain of another host or equals it. name is the domain of a host or, if
// wildcard is true, of a wildcard.
func (t *Table) hasAbove(name wire.Name, wildcard bool, s *Scratch) bool {
	if wildcard {
		if _, found := t.find(name); found { // a host with this name has the same domain
			return true
		}
	}
	for parent := name.Parent(); parent != wire.Root; parent = parent.Parent() {
		if _, found := t.find(parent); found {
			return true
		}
	}
	_, found := t.wildcard(name, s)
	return found
}

// Skipped returns what was left out of the table, sorted by key.
func (t *Table) Skipped() []Skipped {
	var skipped []Skipped
	for i := range t.shards {
		skipped = append(skipped, t.shards[i].skipped...)
	}
	sortSkipped(skipped)
	return skipped
}

// Collisions returns the names that two entries claim, sorted by name. The first call has to find
// them. This takes longer than a small push.
func (t *Table) Collisions() []Collision {
	t.collisionsOnce.Do(t.findCollisions)
	return slices.Clone(t.collisions)
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
