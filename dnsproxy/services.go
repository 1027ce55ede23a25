package dnsproxy

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// srvFixedLen is the length in bytes of an SRV record's data before the target: priority, weight
// and port (RFC 2782).
const srvFixedLen = 6

// maxPointer is the largest offset that a compression pointer can have (RFC 1035, section 4.1.4).
const maxPointer = 1<<14 - 1

// services writes the SRV records of the ports of a Service or an endpoint, and the addresses of
// their targets as additional records. Addresses that do not fit are left out, which truncates
// nothing (RFC 2181, section 9). Without a table there are no records.
//
// Priority and weight are CoreDNS' values: 0, and the same for all. The targets begin at a random
// one.
func (w *writer) services(owner uint16, m *table.Match, t *table.Table) {
	if t == nil {
		return
	}
	m = t.Aliased(m, w.query.Name)
	n := t.CountTargets(m)
	if n == 0 {
		return
	}
	const all = 100
	weight := uint16(max(all/n, 1)) //nolint:gosec // at most all
	first := rand.IntN(n)
	start := len(w.buf)
	t.Targets(m, first, func(target table.Target) bool {
		if !w.record(owner, dns.TypeSRV, srvFixedLen+target.NameLen()+1) {
			return false
		}
		w.buf = binary.BigEndian.AppendUint16(w.buf, 0)
		w.buf = binary.BigEndian.AppendUint16(w.buf, weight)
		w.buf = binary.BigEndian.AppendUint16(w.buf, target.Port)
		w.buf = append(target.AppendName(w.buf), 0) // not compressed (RFC 2782)
		w.answers++
		return true
	})
	if w.truncated {
		return
	}
	written := int(w.answers - w.aliases)
	next := start - w.start // the offset of the target's record
	t.Hosts(m, first, func(target table.Target) bool {
		if written--; written < 0 {
			return false
		}
		name := next + fixedLen + srvFixedLen
		next = name + target.NameLen() + 1
		return name <= maxPointer && (target.Again || w.targetAddresses(name, &target))
	})
}

// hasServices reports whether there are SRV records for a name with a match of a table, which may be nil.
func hasServices(m *table.Match, name wire.Name, t *table.Table) bool {
	return t != nil && t.CountTargets(t.Aliased(m, name)) > 0
}

// targetAddresses writes the addresses of a target, whose name is at an offset of the message, as
// additional records. It reports false, and writes none, if they do not all fit.
func (w *writer) targetAddresses(name int, target *table.Target) bool {
	size := func(rrtype uint16, packed []byte) int {
		return len(packed) / wire.AddressLen(rrtype) * (fixedLen + wire.AddressLen(rrtype))
	}
	if !w.fits(size(dns.TypeA, target.V4) + size(dns.TypeAAAA, target.V6)) {
		return false
	}
	owner := wire.PointerBits | uint16(name) //nolint:gosec // at most maxPointer
	w.additional += w.shuffled(owner, dns.TypeA, target.V4)
	w.additional += w.shuffled(owner, dns.TypeAAAA, target.V6)
	return true
}
