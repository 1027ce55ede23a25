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
	reverse   reverseIndex
	ancestors ancestors

	collisionsOnce sync.Once   // calls findCollisions
	collisions     []Collision // set by findCollisions
}

// Len returns the number of hosts, including wildcards.
func (t *Table) Len() int { return int(t.hosts + t.wildcards) }

// Lookup finds the host with the name of a question. It finds none if the name or the host is bypassed according to
// suffixes. search is the client's search list. If name ends in one of these domains, Lookup also looks for the name
// without this domain (autopath). The first domain with which it finds a host wins.
//
// A client that walks the search list never gets past the first of the cluster's domains in it, because autopath
// answers there. So with any other domain, the client may have written the whole name, and nameservers are asked first
// (Match.Outside), unless the rest is below svc.DOMAIN. No external host has a name with a later one of the cluster's
// domains.
func (t *Table) Lookup(name wire.Name, search []wire.Name, suffixes *Suffixes, s *Scratch) (m Match) {
	l := lookup{t, search, suffixes, s, false}
	if l.written(&m, name) {
		if l.checkRest(&m, name); m.Denied == wire.Root {
			return m
		}
	}
	if !l.autopath(&m, name) && l.bypassed {
		return Match{Rule: RuleNone, Bypassed: true}
	}
	if m.Rule == RuleNone && m.Denied == wire.Root || m.Outside == name {
		l.deny(&m, name)
	}
	return m
}

// Named is Lookup for the name in a record, which has no search domain. It does not find short names.
func (t *Table) Named(name wire.Name, suffixes *Suffixes, s *Scratch) (m Match, found bool) {
	l := lookup{t, nil, suffixes, s, false}
	found = l.written(&m, name) && !m.Short
	return m, found
}

// A lookup is a call of Lookup.
type lookup struct {
	*Table
	search   []wire.Name
	suffixes *Suffixes
	s        *Scratch
	bypassed bool // whether a match does not count because of suffixes
}

// bypasses reports whether name, which is a name of h, does not count because of the suffixes.
func (l *lookup) bypasses(name wire.Name, h *Host) bool {
	bypassed := l.suffixes.Bypasses(name) || l.suffixes.bypassesHost(h)
	l.bypassed = l.bypassed || bypassed
	return bypassed
}

// written finds the host with name as it is written. Otherwise it reports false.
func (l *lookup) written(m *Match, name wire.Name) bool {
	m.Rule = RuleNone
	return !name.Special() && l.direct(m, name, l.s) && !l.bypasses(name, &m.Host)
}

// autopath finds the host with name without a domain of the search list, and sets m to it. If there is none, autopath
// reports false. m is the match of name itself, if this was made by the search list.
func (l *lookup) autopath(m *Match, name wire.Name) bool {
	walked := false // whether one of the cluster's domains came before
	for _, domain := range l.search {
		later, own := walked, l.Cluster.searched(domain)
		walked = walked || own
		target, ok := name.CutSuffix(domain)
		if !ok || name.Special() || target.Special() {
			continue
		}
		made := target.Below(l.Cluster.services) // nobody has such a name with a domain after it
		var found Match
		has := l.direct(&found, target, l.s)
		switch external := !found.Host.Kubernetes(); {
		case !has && (!made || l.suffixes.Bypasses(target)):
		case !has:
			m.Denied = domain
		case own && external && (later || l.denies(name)): // no external host has a name of the cluster
		case !own && m.Denied != wire.Root && !found.Short: // made by the search list from the FQDN of a host
		case l.bypasses(target, &found.Host):
		default:
			found.Base, found.Rule, found.Searched = found.Rule, RuleAutopath, domain
			if !found.Short {
				found.Target = target
			}
			if (!own || later) && !made {
				found.Outside = name
			}
			*m = found
			return true
		}
	}
	return false
}

// checkRest sets m.Outside or m.Denied if m is the match of a wildcard, and a client's resolver may have made name by a
// search domain: a domain in search, or the wildcard's suffix, because the agent need not know the domain. There
// must be several labels before it. If they are a short name of a Service, only a domain in search that comes before
// the cluster's domains counts: from a short name, a resolver makes no name below other domains, unless the Service has
// no address.
func (l *lookup) checkRest(m *Match, name wire.Name) {
	if m.Rule != RuleWildcard {
		return
	}
	domain, walked, first := m.Host.Name.Parent(), false, false
	for _, searched := range l.search {
		if searched.Below(domain) && searched != m.Searched && name.Below(searched) && name != searched {
			domain, m.Searched, first = searched, searched, !walked
		}
		walked = walked || l.Cluster.searched(searched)
	}
	rest := name[:len(name)-len(domain)]
	if rest.Parent() == wire.Root || rest.Special() {
		return
	}
	var own Match
	switch found := l.direct(&own, rest, l.s); {
	case own.Short && !first && (m.Searched == wire.Root || len(own.Host.V4)+len(own.Host.V6) > 0):
	case found || rest.Below(l.Cluster.services):
		m.Denied = domain
	case m.Searched != wire.Root && l.attributed(rest).Denied != wire.Root:
		m.Denied, m.Outside = domain, name
	default:
		m.Outside = rest
	}
}

// deny sets m.Denied if name has no records anywhere, although the table does not have it.
func (l *lookup) deny(m *Match, name wire.Name) {
	if l.denies(name) {
		*m = Match{Rule: RuleNone, Denied: l.Cluster.Domain}
	} else if m.Rule == RuleNone {
		*m = l.attributed(name)
	}
}

// attributed returns a match with Denied set if name is an attribute of a Service, and all names below the Service are
// known. Attributes of a name have labels before it that begin with an underscore (RFC 8552). The name of the Service may
// have any form that Lookup finds.
func (l *lookup) attributed(name wire.Name) Match {
	m, owner := Match{Rule: RuleNone}, name.Owner()
	if owner == name {
		return m
	}
	if of := l.Lookup(owner, l.search, l.suffixes, l.s); of.Denied == wire.Root && l.knowsBelow(of.Host.Name) {
		if m.Denied = owner; of.Outside != wire.Root {
			m.Outside = name
		}
	}
	return m
}

// denies reports whether a name of the cluster domain that the table does not have has no records anywhere: an ancestor
// of mesh names, or a name below a Service below which all names are known.
func (t *Table) denies(name wire.Name) bool {
	return name.Below(t.Cluster.Domain) && (t.knowsBelow(name.Parent()) || t.HasBelow(name))
}

// knowsBelow reports whether all names below name are known: whether name is, or is below, a Service of the cluster domain
// of which the control plane sends the ports.
func (t *Table) knowsBelow(name wire.Name) bool {
	services := t.Cluster.services
	if t.headless+t.ported == 0 || !name.Below(services) {
		return false
	}
	for ; name != services; name = name.Parent() {
		if service, found := t.find(name); found && (service.headless() || service.hasPorts()) {
			return true
		}
	}
	return false
}

// direct is like Lookup, but without a search list and without suffixes. If the table does not have the name, direct
// reports false and does not change m.
func (t *Table) direct(m *Match, name wire.Name, s *Scratch) bool {
	h, exact := t.find(name)
	exact = exact && !h.wildcard()
	if exact && (h.Kubernetes() || name.Below(t.Cluster.Domain)) {
		m.Rule, m.Host = RuleExact, h
		return true
	}
	inDomain := name.Below(t.Cluster.Domain)
	maybePart := t.headless+t.ported > 0 && isPart(name)
	if maybePart && t.part(m, name, false, s) {
		return true // this comes before wildcards, because the name exists (RFC 4592, section 3.3.1)
	}
	if !inDomain {
		if short, ok := t.shortName(name, s); ok {
			m.Rule, m.Host, m.Short, m.Target = RuleShortName, short, true, short.Name
			return true
		}
		if maybePart && t.part(m, name, true, s) {
			m.Target, _ = s.join(m.Prefix, m.Host.Name)
			return true
		}
		if t.headless > 0 && t.ofPod(name, s) {
			return false
		}
		if exact {
			m.Rule, m.Host = RuleExact, h
			return true
		}
	}
	if h, ok := t.wildcard(name, s); ok {
		m.Rule, m.Host = RuleWildcard, h
		return true
	}
	return false
}

// wildcard returns the wildcard that applies to name. If there are several, it is the one with the longest suffix. In
// the cluster's zones, it is a wildcard of the same zone.
func (t *Table) wildcard(name wire.Name, s *Scratch) (Host, bool) {
	zone := t.Cluster.zone(name)
	if t.wildcards == 0 || name == zone || zone != wire.Root && t.zoned == 0 {
		return Host{}, false
	}
	for suffix := name.Parent(); suffix != zone; suffix = suffix.Parent() {
		if starred, ok := s.join(wire.WildcardLabel, suffix); ok {
			if h, ok := t.find(starred); ok {
				return h, true
			}
		}
	}
	return Host{}, false
}

// shortName returns the Service that has name as a short name. The forms of such names are, in order of precedence:
// name.namespace, name.namespace.svc, and name in the agent's namespace.
func (t *Table) shortName(name wire.Name, s *Scratch) (Host, bool) {
	c := &t.Cluster
	if name == wire.Root || !t.tails.mayHave(name) {
		return Host{}, false
	}
	if h, ok := t.derived(name, c.services, s); ok {
		return h, true
	}
	if name.Below(svcName) {
		if h, ok := t.derived(name, c.Domain, s); ok {
			return h, true
		}
	}
	if c.ownNamespace == wire.Root {
		return Host{}, false
	}
	return t.derived(name, c.ownNamespace, s)
}

// ofPod reports whether name is the short name of a pod of a headless Service, or of one that may come: one label,
// followed by a short name of the Service.
func (t *Table) ofPod(name wire.Name, s *Scratch) bool {
	if name == wire.Root {
		return false
	}
	h, ok := t.shortName(name.Parent(), s)
	return ok && h.headless()
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

// owner returns the host that has name as its FQDN or short name. Its name is empty if there is none.
func (t *Table) owner(name wire.Name, s *Scratch) Host {
	h, _ := t.find(name)
	if h.Kubernetes() || name.Below(t.Cluster.Domain) {
		return h
	}
	if short, ok := t.shortName(name, s); ok {
		return short
	}
	return h
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
	var named int
	var of addresses
	for p := range m.Host.ports {
		if p.hasName(m.Prefix) {
			named++
			of = p.addresses
		}
	}
	if named == 1 && m.Host.headless() { // several ports of one name together have all endpoints
		m.Host.addresses = of
	}
	return named > 0
}

// endpoint finds the endpoint of a headless Service that has name, and sets m to it. name is a label with the
// endpoint's address, followed by the FQDN of the Service or, if m.Short is set, by a short name. endpoint reports false
// if there is no such endpoint.
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
	return t.findWhole(m, parent, s) && m.Host.headless() && m.Host.narrow(addr)
}

// findWhole sets m.Host to the host that has name as its FQDN or, if m.Short is set, as a short name. It reports
// false if there is no such host, or if m.Prefix followed by its FQDN is too long for a name.
func (t *Table) findWhole(m *Match, name wire.Name, s *Scratch) (found bool) {
	m.Host, found = t.find(name)
	if m.Short {
		if found && m.Host.Kubernetes() {
			return false // name is an FQDN, and not a short name
		}
		m.Host, found = t.shortName(name, s)
	}
	return found && len(m.Prefix)+len(m.Host.Name) <= wire.MaxNameLen
}

// narrow removes all addresses except addr from h, which is a headless Service. It reports false if h does
// not have addr.
func (h *Host) narrow(addr netip.Addr) bool {
	bytes := addr.As16()
	one := h.find(bytes[len(bytes)-addr.BitLen()/8:])
	if h.V4, h.V6, h.near = nil, nil, [2]uint32{}; addr.Is6() {
		h.V6 = one
	} else {
		h.V4 = one
	}
	return one != nil
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
// address: the Services or, if there are none, the external hosts. Nameservers are asked before these (Match.Outside),
// because the address may have a name of its own. Pointer leaves out hosts that are bypassed according to suffixes.
func (t *Table) Pointer(name wire.Name, suffixes *Suffixes, s *Scratch) Match {
	addr, ok := wire.ReverseAddr(name)
	if !ok {
		return Match{Rule: RuleNone}
	}
	addr = addr.Unmap()
	bytes := addr.As16()
	services, bypassed := t.pointers(bytes[len(bytes)-addr.BitLen()/8:], suffixes, s)
	m := Match{Rule: RulePTR, Pointers: s.ptr}
	switch {
	case len(s.ptr) == 0:
		return Match{Rule: RuleNone, Bypassed: bypassed}
	case !services:
		m.Outside = name
	}
	return m
}

// pointers sets s.ptr to the FQDNs of the hosts that have a packed address, sorted, and at most maxPointers of
// them. They are all Services, or all external hosts. pointers reports whether a host was left out because it is
// bypassed.
//
// For a headless Service, the result has the name of the endpoint with this address instead. If pods with host names
// have the address, these are the names of the pods. Otherwise it is a label with the address, followed by the name
// of the Service. Services below the cluster domain, and Services outside of it such as ServiceImports, may both
// have the address. pointers decides separately for these two groups whether pods have it.
func (t *Table) pointers(packed []byte, suffixes *Suffixes, s *Scratch) (services, bypassed bool) {
	s.ptr, s.services, s.dashed = s.ptr[:0], s.services[:0], s.dashed[:0]
	n := 0
	t.hostsWith(packed, func(h Host) bool {
		switch n++; {
		case h.wildcard(): // a wildcard has no FQDN that could be a PTR record's target
		case suffixes.bypassesHost(&h):
			bypassed = true
		case services && !h.Kubernetes(): // Services come first
			return false
		default:
			services = h.Kubernetes()
			if h.headless() {
				s.services = append(s.services, h.Name)
			} else {
				s.ptr = append(s.ptr, h.Name)
			}
		}
		return len(s.services)+len(s.ptr) < maxPointers && n < maxPointersLookedAt
	})
	var havePods [2]bool // indexed by the result of the method side
	for _, service := range s.services {
		t.pods(service, packed, func(pod Host) bool {
			if !suffixes.bypassesHost(&pod) {
				havePods[t.side(service)] = true
				s.ptr = append(s.ptr, pod.Name)
			}
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
	slices.Sort(s.ptr)
	s.ptr = slices.Compact(s.ptr)
	s.ptr = s.ptr[:min(len(s.ptr), maxPointers)]
	return services, bypassed
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
	t.hostsWith(addr.Unmap().AsSlice(), func(h Host) bool {
		yield(h)
		return true
	})
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
// Then name exists, but has no records (RFC 8020, RFC 4592).
func (t *Table) HasBelow(name wire.Name) bool {
	return t.ancestors.has(name, t.seed) || t.hasPortBelow(name)
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
	var heads [3]wire.Name
	for h := range t.all {
		if !h.derived() {
			continue
		}
		for _, name := range t.Cluster.heads(h.Name, heads[:0]) {
			if winner := t.owner(name, &s); winner.Name != h.Name && !name.Special() {
				found = append(found, Collision{name.String(), winner.Key(), h.Key()})
			}
		}
	}
	for h := range t.all {
		if winner := t.owner(h.Name, &s); winner.Name != h.Name {
			found = append(found, Collision{h.Name.String(), winner.Key(), h.Key()})
		}
	}
	sort.Slice(found, func(i, j int) bool {
		x, y := found[i], found[j]
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.Winner, y.Winner), cmp.Compare(x.Loser, y.Loser)) < 0
	})
	t.collisions = slices.Compact(found)
}
