package table

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Target is what an SRV record says (RFC 2782): a port, and a host that has it.
type Target struct {
	Port uint16
	// V4 and V6 are the packed addresses of the host.
	V4, V6 []byte
	// Again says that an earlier record has the same host.
	Again bool

	// The name of the host is label, in wire form, before name. It is copied, so that it needs
	// no memory of its own.
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

// services are the SRV records for a name.
type services struct {
	table *Table
	match *Match
	// holder is the host that has the ports.
	holder Host
	// each says that the records are for each endpoint of a headless Service; otherwise there is
	// one for each port.
	each bool
}

// newServices returns the SRV records for a name: those of a port or of all ports of a Service,
// or those of the ports of an endpoint.
func (t *Table) newServices(m *Match) services {
	s := services{table: t, match: m, holder: m.Host}
	s.each = m.Host.headless() && m.BaseRule() != RuleEndpoint
	if !m.Host.hasPorts() && m.Host.Name != wire.Root {
		near, far := m.Host.servicesOfPod()
		for _, name := range []wire.Name{far, near} {
			if service, ok := t.find(name); ok && service.headless() && m.Host.podOf(service.Name) {
				s.holder = service
			}
		}
	}
	return s
}

// ports yields the ports that have records.
func (s *services) ports(yield func(port) bool) {
	for p := range s.holder.ports {
		if s.match.BaseRule() == RulePort && !p.named(s.match.Prefix) {
			continue
		}
		if !s.each && p.first(&s.match.Host) == nil {
			continue // not a port of this endpoint
		}
		if !yield(p) {
			return
		}
	}
}

// first returns the first address of a host that has the port, nil if none has.
func (p *port) first(h *Host) []byte {
	for rest := h.V4; len(rest) > 0; rest = rest[wire.AddressLen(dns.TypeA):] {
		if one := rest[:wire.AddressLen(dns.TypeA)]; p.has(one) {
			return one
		}
	}
	for rest := h.V6; len(rest) > 0; rest = rest[wire.AddressLen(dns.TypeAAAA):] {
		if one := rest[:wire.AddressLen(dns.TypeAAAA)]; p.has(one) {
			return one
		}
	}
	return nil
}

// CountTargets returns the number of addresses that the targets for a name have, each counted for
// each port; 0 if there is no target.
func (t *Table) CountTargets(m *Match) int {
	n := 0
	s := t.newServices(m)
	for p := range s.ports {
		v4, v6 := m.Host.V4, m.Host.V6
		if s.each {
			v4, v6 = p.v4, p.v6
		}
		n += countPacked(v4, v6)
	}
	return n
}

func countPacked(v4, v6 []byte) int {
	return len(v4)/wire.AddressLen(dns.TypeA) + len(v6)/wire.AddressLen(dns.TypeAAAA)
}

// Targets calls yield for the targets for a name until it returns false: all hosts for the first
// port, then those for the next one. Hosts that have a port's number by an earlier port are left
// out. The hosts begin at the one with the index first, which may be any number.
func (t *Table) Targets(m *Match, first int, yield func(Target) bool) {
	s := t.newServices(m)
	n := 0
	for p := range s.ports {
		n++
		next := func(target Target) bool {
			var done bool
			target.Port = p.number
			target.Again, done = s.before(&target, n)
			return done || yield(target)
		}
		if s.each {
			if !s.endpoints(&p, first, next) {
				return
			}
			continue
		}
		target := Target{V4: m.Host.V4, V6: m.Host.V6, name: m.Host.Name}
		if m.BaseRule() == RuleEndpoint {
			target.labelLen = copy(target.label[:], m.Prefix)
		}
		if !next(target) {
			return
		}
	}
}

// before reports whether a port before the nth one has the host of a target, and whether such a
// port has its number.
func (s *services) before(target *Target, nth int) (again, done bool) {
	host := Host{V4: target.V4, V6: target.V6}
	for p := range s.ports {
		if nth--; nth == 0 {
			break
		}
		if p.first(&host) != nil {
			again = true
			done = done || p.number == target.Port
		}
	}
	return again, done
}

// endpoints calls yield for each endpoint of a headless Service that has a port. It reports false
// if yield does.
func (s *services) endpoints(p *port, first int, yield func(Target) bool) bool {
	n4, n := len(p.v4)/wire.AddressLen(dns.TypeA), countPacked(p.v4, p.v6)
	for i := range n {
		at := (first + i) % n
		var packed []byte
		if at < n4 {
			packed = p.v4[at*wire.AddressLen(dns.TypeA):][:wire.AddressLen(dns.TypeA)]
		} else {
			packed = p.v6[(at-n4)*wire.AddressLen(dns.TypeAAAA):][:wire.AddressLen(dns.TypeAAAA)]
		}
		if !s.endpoint(p, packed, yield) {
			return false
		}
	}
	return true
}

// endpoint calls yield for the endpoint with an address: a pod with a host name, once for all its
// addresses, or the name with that address. It reports false if yield does.
func (s *services) endpoint(p *port, packed []byte, yield func(Target) bool) bool {
	service := s.holder.Name
	isPod, ok := false, true
	s.table.having(packed, func(h Host) {
		if h.podOf(service) {
			isPod = true
			if ok && string(p.first(&h)) == string(packed) {
				ok = yield(Target{V4: h.V4, V6: h.V6, name: h.Name})
			}
		}
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
