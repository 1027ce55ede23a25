package table

import (
	"math/bits"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Target is the content of one SRV record (RFC 2782): a port, and a host that has the port.
type Target struct {
	Port uint16
	// V4 and V6 are the packed addresses of the host.
	V4, V6 []byte
	// Repeated is true if an earlier record has the same host. Only Hosts sets it.
	Repeated bool

	// The name of the host is label[:labelLen], in wire form, followed by name. label is an array, so that it
	// need not be allocated.
	label    [1 + maxDashed]byte
	labelLen int
	name     wire.Name
}

// NameLen returns the length in bytes of the host's name.
func (t *Target) NameLen() int { return t.labelLen + len(t.name) }

// AppendName appends the host's name, without the root label, to dst.
func (t *Target) AppendName(dst []byte) []byte {
	return append(append(dst, t.label[:t.labelLen]...), t.name...)
}

// CountTargets returns the number of addresses of all targets of a match. An address counts once for
// each port. The result is 0 if there is no target.
func (t *Table) CountTargets(m *Match) int {
	n := 0
	s := t.newSRV(m)
	for p := range s.ports {
		v4, v6 := m.Host.V4, m.Host.V6
		if s.perEndpoint {
			v4, v6 = p.V4, p.V6
		}
		n += countPacked(v4, v6)
	}
	return n
}

func countPacked(v4, v6 []byte) int {
	return len(v4)/wire.AddressLen(dns.TypeA) + len(v6)/wire.AddressLen(dns.TypeAAAA)
}

// Targets calls yield for the targets of a match until yield returns false. First come all hosts that have the first
// port, then all hosts that have the next port. A host is left out if it also has an earlier port with the same
// number. For each port, the hosts begin with the host at the index start; this may be any number. If there are very
// many endpoints, some of them are left out.
func (t *Table) Targets(m *Match, start int, yield func(Target) bool) {
	s := t.newSRV(m)
	s.eachTarget(start, yield)
}

// Hosts is like Targets, but also sets Target.Repeated. The order is the same.
func (t *Table) Hosts(m *Match, start int, yield func(Target) bool) {
	s := t.newSRV(m)
	s.wantRepeated = true
	s.eachTarget(start, yield)
}

// A srv finds the SRV records for the name of a match.
type srv struct {
	table *Table
	match *Match
	// holder is the host that has the ports.
	holder Host
	// perEndpoint is true if there is a record for each endpoint of a headless Service; otherwise there is a record for
	// each port.
	perEndpoint bool
	// portBits has a bit for each port of holder. The bit is set if the host of the match has the port. If perEndpoint
	// is true, portBits is not used.
	portBits [(maxPorts + 63) / 64]uint64
	// wantRepeated is true if Target.Repeated is to be set.
	wantRepeated bool
	// search is the effort to find targets, and comparison is the effort to set Target.Repeated. Each has a bound of
	// its own, so that Hosts finds the same targets as Targets.
	search, comparison effort
}

// newSRV returns a srv for a match. There are records for one port or for all ports of a Service, or
// for the ports of an endpoint.
func (t *Table) newSRV(m *Match) srv {
	s := srv{table: t, match: m, holder: m.Host}
	s.perEndpoint = m.Host.headless() && m.BaseRule() != RuleEndpoint
	if !m.Host.hasPorts() && m.Host.Name != wire.Root {
		parent, grandparent := m.Host.servicesOfPod()
		for _, name := range []wire.Name{grandparent, parent} {
			if service, ok := t.find(name); ok && service.headless() && m.Host.podOf(service.Name) {
				s.holder = service
			}
		}
	}
	if !s.perEndpoint {
		s.findPorts()
	}
	return s
}

// findPorts sets portBits.
func (s *srv) findPorts() {
	i, search := 0, effort{}
	for p := range s.holder.ports {
		if !search.exceeded && search.firstAddress(&p, &s.match.Host.addresses) != nil {
			s.portBits[i/64] |= 1 << (i % 64)
		}
		i++
	}
}

// ports yields the ports that have records.
func (s *srv) ports(yield func(port) bool) {
	i := -1
	for p := range s.holder.ports {
		i++
		if s.match.BaseRule() == RulePort && !p.hasName(s.match.Prefix) {
			continue
		}
		if !s.perEndpoint && s.portBits[i/64]>>(i%64)&1 == 0 {
			continue // not a port of this endpoint
		}
		if !yield(p) {
			return
		}
	}
}

// eachTarget calls yield for the targets. It looks at the addresses from the index start on. A pod with several
// addresses is yielded only at its first address. So there may be many addresses after start that yield no target. If
// the bound of search is reached before a target is found, eachTarget begins again at index 0.
func (s *srv) eachTarget(start int, yield func(Target) bool) {
	found := false
	next := func(target Target) bool {
		found = true
		s.search.spent -= targetCost
		s.comparison.spent -= targetCost
		return yield(target)
	}
	if s.eachTargetFrom(start, next); !found && s.search.exceeded {
		s.search, s.comparison = effort{}, effort{}
		s.eachTargetFrom(0, next)
	}
}

// eachTargetFrom calls yield for the targets. The hosts begin at the index start.
func (s *srv) eachTargetFrom(start int, yield func(Target) bool) {
	n := 0
	for p := range s.ports {
		n++
		repeated := s.repeated(&p, n)
		next := func(target Target) bool {
			target.Port = p.number
			target.Repeated = s.wantRepeated && s.hasEarlierPort(&target, n, 0, &s.comparison)
			return repeated && s.hasEarlierPort(&target, n, p.number, &s.search) || yield(target)
		}
		if s.perEndpoint {
			if !s.endpoints(&p, start, next) {
				return
			}
			continue
		}
		target := Target{V4: s.match.Host.V4, V6: s.match.Host.V6, name: s.match.Host.Name}
		if s.match.BaseRule() == RuleEndpoint {
			target.labelLen = copy(target.label[:], s.match.Prefix)
		}
		if !next(target) {
			return
		}
	}
}

// repeated reports whether one of the ports before the port p has the same number. p is the nth port.
func (s *srv) repeated(p *port, nth int) bool {
	for earlier := range s.ports {
		if nth--; nth == 0 {
			break
		}
		if earlier.number == p.number {
			return true
		}
	}
	return false
}

// hasEarlierPort reports whether the host of target also has one of the ports before the nth port. If number is not 0,
// only ports with this number count. The comparisons are added to e. Once e is over its bound, the result is true.
func (s *srv) hasEarlierPort(target *Target, nth int, number uint16, e *effort) bool {
	host := addresses{V4: target.V4, V6: target.V6}
	for p := range s.ports {
		if nth--; nth == 0 {
			break
		}
		if number != 0 && p.number != number {
			continue
		}
		if !s.perEndpoint || e.exceeded || e.firstAddress(&p, &host) != nil {
			return true // if perEndpoint is false, all these ports are of the one host
		}
	}
	return false
}

// endpoints calls yield for each endpoint of a headless Service that has the port p. Endpoints with an IPv4 address
// come before endpoints with an IPv6 address. If yield returns false, or s.search is over its bound, endpoints ends and
// reports false.
func (s *srv) endpoints(p *port, start int, yield func(Target) bool) bool {
	for _, list := range [...]struct {
		packed []byte
		size   int
	}{{p.V4, wire.AddressLen(dns.TypeA)}, {p.V6, wire.AddressLen(dns.TypeAAAA)}} {
		n := len(list.packed) / list.size
		for i := range n {
			if !s.search.add(endpointCost) {
				return false
			}
			index := (start + i) % n
			if !s.endpoint(p, list.packed[index*list.size:][:list.size], yield) {
				return false
			}
		}
	}
	return true
}

// endpoint calls yield for the endpoint with a packed address. If pods with host names have the address, it calls yield
// for each of these pods, but only if this is the first address of the pod. Otherwise it calls yield for a host whose
// name is made of the address. If yield returns false, or s.search is over its bound, endpoint ends and reports false.
func (s *srv) endpoint(p *port, packed []byte, yield func(Target) bool) bool {
	service := s.holder.Name
	isPod, ok := false, true
	s.table.pods(service, packed, func(h Host) bool {
		isPod = true
		if !s.search.add(endpointCost) {
			ok = false
		} else if isLookedAt(&h.addresses, packed) && string(s.search.firstAddress(p, &h.addresses)) == string(packed) {
			ok = yield(Target{V4: h.V4, V6: h.V6, name: h.Name})
		}
		return ok
	})
	if isPod {
		return ok
	}
	target := Target{name: service}
	target.labelLen = len(appendDashed(target.label[:0], packed))
	if len(packed) == wire.AddressLen(dns.TypeA) {
		target.V4 = packed
	} else {
		target.V6 = packed
	}
	return target.NameLen() > wire.MaxNameLen || yield(target)
}

// maxPodAddresses bounds how many addresses of a host are compared to find one that has a port.
const maxPodAddresses = 16

// firstAddress returns the first address in h, the addresses of a host, that has the port p. It compares only the first
// maxPodAddresses of each family, and returns nil if none of these has the port. It adds the comparisons to e.
func (e *effort) firstAddress(p *port, h *addresses) []byte {
	cost := comparisonCost * (1 + bits.Len(uint(len(p.V4)+len(p.V6))))
	for _, list := range [...]struct {
		packed []byte
		size   int
	}{{h.V4, wire.AddressLen(dns.TypeA)}, {h.V6, wire.AddressLen(dns.TypeAAAA)}} {
		for offset := 0; offset < min(len(list.packed), maxPodAddresses*list.size); offset += list.size {
			e.add(cost)
			if one := list.packed[offset:][:list.size]; p.has(one) {
				return one
			}
		}
	}
	return nil
}

// isLookedAt reports whether a packed address is one of the addresses in a that [effort.firstAddress] compares.
func isLookedAt(a *addresses, packed []byte) bool {
	all := a.V4
	if len(packed) == wire.AddressLen(dns.TypeAAAA) {
		all = a.V6
	}
	for offset := 0; offset < min(len(all), maxPodAddresses*len(packed)); offset += len(packed) {
		if string(all[offset:offset+len(packed)]) == string(packed) {
			return true
		}
	}
	return false
}

// An effort is the work that was done for one answer. Once it has exceeded its bound, exceeded stays true, even if
// spent is reduced.
type effort struct {
	spent    int  // in units of about a nanosecond
	exceeded bool // whether spent has ever been more than maxEffort
}

// An answer may cost maxEffort, and targetCost more for each of its targets. targetCost is the cost of several pods
// with addresses of both families. So the bound does not leave out targets that would fit in a message.
const (
	maxEffort      = 200 * endpointCost
	targetCost     = 8 * endpointCost
	endpointCost   = 80 // the cost of an endpoint or a pod
	comparisonCost = 3  // the cost of comparing two addresses
)

// add adds n to what was spent, and reports whether the effort is within its bound.
func (e *effort) add(n int) bool {
	e.spent += n
	e.exceeded = e.exceeded || e.spent > maxEffort
	return !e.exceeded
}
