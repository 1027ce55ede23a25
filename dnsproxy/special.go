package dnsproxy

import (
	"errors"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

var (
	errTransfer = errors.New("nametap does not give zone transfers of names that it answers itself")
)

// meantSpecial returns the suffixes that are in a special-use zone. A setting that names one
// gives it another meaning, as onion has on a host with Tor.
func meantSpecial(suffixes []wire.Name) []wire.Name {
	return slices.DeleteFunc(slices.Clone(suffixes), func(s wire.Name) bool { return !s.Special() })
}

// isTransfer reports whether qtype is that of a zone transfer.
func isTransfer(qtype uint16) bool { return qtype == dns.TypeAXFR || qtype == dns.TypeIXFR }

// special writes the response for a name in a special-use zone.
func (w *writer) special(zone wire.Name) {
	name, qtype := w.query.Name, w.query.Type
	switch zone {
	case wire.Localhost:
		w.localhost()
		return
	case wire.Invalid, wire.Onion:
		w.negative(negative{dns.RcodeNameError, wire.Root}) // the answer of the root servers
		return
	case wire.Loopback4, wire.Localhost6:
		if (name == wire.Localhost4 || name == wire.Localhost6) && (qtype == dns.TypePTR || qtype == dns.TypeANY) {
			w.pointers([]wire.Name{wire.Localhost})
			return
		}
	}
	n := negative{dns.RcodeNameError, zone}
	if name == zone || zone == wire.ResolverArpa || wire.Localhost4.Below(name) {
		n.rcode = dns.RcodeSuccess
	}
	w.negative(n)
}

// localhost writes the response for localhost or a name below it (RFC 6761, section 6.3).
func (w *writer) localhost() {
	const v4, v6 = "\x7f\x00\x00\x01", "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
	qtype := w.query.Type
	wants4, wants6 := qtype == dns.TypeA || qtype == dns.TypeANY, qtype == dns.TypeAAAA || qtype == dns.TypeANY
	if !wants4 && !wants6 {
		w.negative(negative{dns.RcodeSuccess, wire.Localhost})
		return
	}
	w.begin()
	if wants4 && w.record(questionName, dns.TypeA, len(v4)) {
		w.buf = append(w.buf, v4...)
		w.answers++
	}
	if wants6 && w.record(questionName, dns.TypeAAAA, len(v6)) {
		w.buf = append(w.buf, v6...)
		w.answers++
	}
	w.end(wire.AA, dns.RcodeSuccess, nil)
}

// respondSpecial appends the response for a name in a special-use zone, of at most limit
// bytes, to dst.
func (a *answerer) respondSpecial(dst []byte, q *wire.Query, zone wire.Name, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit}
	w.special(zone)
	return w.buf
}
