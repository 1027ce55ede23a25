package table

import (
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Target is the content of one SRV record (RFC 2782): a port, and a host that has the port.
type Target struct {
	Port uint16
	// V4 and V6 are the packed addresses of the host.
	V4, V6 []byte
	// Repeated is true if an earlier record has the same host.
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
		n += len(v4)/wire.AddressLen(dns.TypeA) + len(v6)/wire.AddressLen(dns.TypeAAAA)
	}
	return n
}

// Targets calls yield for the targets of a match until yield returns false. First come all hosts that have the first
// port, then all hosts that have the next port. A host is left out if it also has an earlier port with the same
// number. For each port, the hosts begin with the host at the index start; this may be any number. If very many
// endpoints are no targets, because their pods have other addresses, some targets are left out, but not all: then the
// hosts begin with the first one.
func (t *Table) Targets(m *Match, start int, yield func(Target) bool) {
	if !t.targets(m, start, yield) {
		t.targets(m, 0, yield)
	}
}

// targets is Targets. It reports whether there was a target, or all endpoints were looked at.
func (t *Table) targets(m *Match, start int, yield func(Target) bool) (found bool) {
	s := t.newSRV(m)
	var numbers [maxPorts]uint16 // of the ports so far
	n := 0
	for p := range s.ports {
		again := slices.Contains(numbers[:n], p.number)
		numbers[n] = p.number
		n++
		next := func(target Target) bool {
			found = true
			target.Port, target.Repeated = p.number, n > 1 && s.hasEarlierPort(&target, n, 0)
			if again && s.hasEarlierPort(&target, n, p.number) {
				return true
			}
			s.looks += n * looksPerPort
			return yield(target)
		}
		if s.perEndpoint {
			if !s.endpoints(&p, start, next) {
				return found
			}
			continue
		}
		target := Target{V4: m.Host.V4, V6: m.Host.V6, name: m.Host.Name}
		if m.BaseRule() == RuleEndpoint {
			target.labelLen = copy(target.label[:], m.Prefix)
		}
		if !next(target) {
			return true
		}
	}
	return true
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
	// looks is how many endpoints, pods and addresses may still be looked at. No target that fits in a message is left out
	// for it: each adds looksPerPort for its port and for each one before, which is enough for the next target.
	looks int
}

const (
	maxLooks, looksPerPort = 500, 16
	// podAddresses is how many addresses of a pod are compared in each family.
	podAddresses = 2
)

// newSRV returns a srv for a match. There are records for one port or for all ports of a Service, or
// for the ports of an endpoint.
func (t *Table) newSRV(m *Match) srv {
	s := srv{table: t, match: m, holder: m.Host, looks: maxLooks}
	s.perEndpoint = m.Host.headless() && m.BaseRule() != RuleEndpoint
	if !m.Host.hasPorts() && m.Host.Name != wire.Root {
		parent, grandparent := m.Host.servicesOfPod()
		for _, name := range []wire.Name{grandparent, parent} {
			if service, ok := t.find(name); ok && service.headless() && m.Host.podOf(service.Name) {
				s.holder = service
			}
		}
	}
	return s
}

// ports yields the ports that have records.
func (s *srv) ports(yield func(port) bool) {
	for p := range s.holder.ports {
		wanted := s.match.BaseRule() != RulePort || p.hasName(s.match.Prefix)
		if wanted && (s.perEndpoint || s.firstAddress(&p, &s.match.Host.addresses) != nil) && !yield(p) {
			return
		}
	}
}

// hasEarlierPort reports whether the host of target also has one of the ports before the nth port. If number is not 0,
// only ports with this number count.
func (s *srv) hasEarlierPort(target *Target, nth int, number uint16) bool {
	if !s.perEndpoint {
		return true // all ports are of the one host
	}
	host := addresses{V4: target.V4, V6: target.V6}
	for p := range s.ports {
		if nth--; nth == 0 {
			break
		}
		if (number == 0 || p.number == number) && s.firstAddress(&p, &host) != nil {
			return true
		}
	}
	return false
}

// endpoints calls yield for each endpoint of a headless Service that has the port p. Endpoints with an IPv4 address
// come before endpoints with an IPv6 address. If yield returns false, or no more may be looked at, endpoints ends and
// reports false.
func (s *srv) endpoints(p *port, start int, yield func(Target) bool) bool {
	for _, list := range byFamily(&p.addresses) {
		n := len(list.packed) / list.size
		for i := range n {
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
// name is made of the address. If yield returns false, or no more may be looked at, endpoint ends and reports false.
func (s *srv) endpoint(p *port, packed []byte, yield func(Target) bool) bool {
	service := s.holder.Name
	isPod, ok := false, true
	s.table.pods(service, packed, func(h Host) bool {
		isPod = true
		if s.looks--; string(s.firstAddress(p, &h.addresses)) == string(packed) {
			ok = yield(Target{V4: h.V4, V6: h.V6, name: h.Name})
		}
		ok = ok && s.looks > 0
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
	s.looks--
	return (target.NameLen() > wire.MaxNameLen || yield(target)) && s.looks > 0
}

// firstAddress returns the first address in h, the addresses of a host, that has the port p. It compares only the first
// podAddresses of each family, and returns nil if none of these has the port.
func (s *srv) firstAddress(p *port, h *addresses) []byte {
	for _, list := range byFamily(h) {
		for offset := 0; offset < min(len(list.packed), podAddresses*list.size); offset += list.size {
			s.looks--
			if one := list.packed[offset:][:list.size]; p.has(one) {
				return one
			}
		}
	}
	return nil
}

// byFamily returns the packed addresses of each family, with the size of one.
func byFamily(a *addresses) [2]struct {
	packed []byte
	size   int
} {
	return [...]struct {
		packed []byte
		size   int
	}{{a.V4, wire.AddressLen(dns.TypeA)}, {a.V6, wire.AddressLen(dns.TypeAAAA)}}
}
