package dnsproxy

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A writer makes one response to an own name, in wire form.
type writer struct {
	*answerer
	query *wire.Query
	buf   []byte // the response from start on
	start int
	limit int // bytes, for the whole response
	// zone is the zone of negative answers, a tail of the name that has no records; the
	// root if that name is a zone of its own.
	zone wire.Name
	// counts of records so far, and whether one had to be left out
	answers, authority uint16
	truncated          bool
}

// questionName is the pointer to the question's name, byte for byte as the client
// wrote it.
const questionName uint16 = wire.PointerBits | wire.HeaderLen

// fixedLen is the length of a record's owner as a pointer, type, class, TTL and
// data length.
const fixedLen = 12

// addresses writes the response for a host: its addresses of the type asked for,
// below the CNAME of an autopath name; without any, the SOA that lets the answer
// be cached (RFC 2308).
func (w *writer) addresses(m table.Match) {
	w.begin()
	owner := questionName
	if m.Rule == table.RuleAutopath {
		owner = w.cname(m)
	}
	var v4, v6 []byte
	switch w.query.Type {
	case dns.TypeA:
		v4 = m.Host.V4
	case dns.TypeAAAA:
		v6 = m.Host.V6
	case dns.TypeANY:
		v4, v6 = m.Host.V4, m.Host.V6
	}
	switch {
	case len(v4)+len(v6) == 0:
		w.soa(w.apex(owner, m.Owner(w.query.Name)))
	default:
		w.shuffled(owner, dns.TypeA, v4)
		w.shuffled(owner, dns.TypeAAAA, v6)
	}
	w.end(wire.AA, dns.RcodeSuccess, nil)
}

// pointers writes the response for the PTR name of an address that the hosts
// names have.
func (w *writer) pointers(names []wire.Name) {
	w.begin()
	if w.query.Type != dns.TypePTR && w.query.Type != dns.TypeANY {
		w.soa(w.apex(questionName, w.query.Name))
		w.end(wire.AA, dns.RcodeSuccess, nil)
		return
	}
	for _, name := range names {
		if !w.record(questionName, dns.TypePTR, len(name)+1) {
			break
		}
		w.buf = append(append(w.buf, name...), 0)
		w.answers++
	}
	w.end(wire.AA, dns.RcodeSuccess, nil)
}

// begin writes the header and the question as they came, and keeps room for the
// OPT record.
func (w *writer) begin() {
	w.buf = append(w.buf, w.query.Packet[:w.query.QuestionEnd]...)
	if w.query.EDNS {
		w.limit -= wire.OPTLen
	}
}

// failure writes a response without records. Its length is bounded by maxReason.
func (w *writer) failure(why failure) {
	w.buf = append(w.buf, w.query.Packet[:w.query.QuestionEnd]...)
	var option []byte
	if w.query.EDNS && why.err != nil {
		text := why.text()
		const infoCode = 2
		option = binary.BigEndian.AppendUint16(option, dns.EDNS0EDE)
		option = binary.BigEndian.AppendUint16(option, uint16(infoCode+len(text))) //nolint:gosec // at most maxReason
		option = binary.BigEndian.AppendUint16(option, why.code)
		option = append(option, text...)
	}
	w.end(0, why.rcode, option)
}

// negative writes a response without answers; the question for the zone's SOA has that.
func (w *writer) negative(n negative) {
	w.begin()
	tail := len(w.query.Name) - len(n.zone)
	w.soa(questionName + uint16(tail)) //nolint:gosec // within the question
	if tail == 0 && w.query.Type == dns.TypeSOA && n.rcode == dns.RcodeSuccess {
		w.answers, w.authority = w.authority, 0
	}
	w.end(wire.AA, n.rcode, nil)
}

// end writes the OPT record with its option and completes the header.
func (w *writer) end(aa byte, rcode int, option []byte) {
	var additional uint16
	if w.query.EDNS {
		var ttl uint32
		if w.query.DO {
			ttl = wire.OPTDO
		}
		w.buf = wire.AppendOPT(w.buf, w.ednsUDPSize, ttl)
		binary.BigEndian.PutUint16(w.buf[len(w.buf)-2:], uint16(len(option))) //nolint:gosec // at most maxReason
		w.buf = append(w.buf, option...)
		additional = 1
	}
	header := w.buf[w.start:]
	header[wire.FlagsOffset] = wire.QR | aa | header[wire.FlagsOffset]&wire.RD
	if w.truncated {
		header[wire.FlagsOffset] |= wire.TC
	}
	header[wire.FlagsOffset+1] = wire.RA | header[wire.FlagsOffset+1]&wire.CD | byte(rcode) //nolint:gosec // without extended bits
	binary.BigEndian.PutUint16(header[wire.ANCountOffset:], w.answers)
	binary.BigEndian.PutUint16(header[wire.NSCountOffset:], w.authority)
	binary.BigEndian.PutUint16(header[wire.ARCountOffset:], additional)
}

// record writes a record up to its data, of dataLen bytes, if the whole of it
// fits.
func (w *writer) record(owner, rrtype uint16, dataLen int) bool {
	if w.truncated || len(w.buf)-w.start+fixedLen+dataLen > w.limit {
		w.truncated = true
		return false
	}
	w.buf = binary.BigEndian.AppendUint16(w.buf, owner)
	w.buf = binary.BigEndian.AppendUint16(w.buf, rrtype)
	w.buf = binary.BigEndian.AppendUint16(w.buf, dns.ClassINET)
	w.buf = binary.BigEndian.AppendUint32(w.buf, w.ttl)
	w.buf = binary.BigEndian.AppendUint16(w.buf, uint16(dataLen)) //nolint:gosec // at most 300
	return true
}

// cname writes the CNAME of an autopath name and returns the pointer to its target:
// the name without the search domain, as the client spelled it, or the host's FQDN if
// that is a short name. systemd-resolved takes a CNAME from a name to its own first
// label for a loop.
func (w *writer) cname(m table.Match) (target uint16) {
	n := len(m.Target)
	if m.Base == table.RuleShortName {
		n = len(m.Host.Name)
	}
	if !w.record(questionName, dns.TypeCNAME, n+1) {
		return questionName
	}
	target = wire.PointerBits | uint16(len(w.buf)-w.start) //nolint:gosec // header, question and one record
	if m.Base == table.RuleShortName {
		w.buf = append(w.buf, m.Host.Name...)
	} else {
		w.buf = append(w.buf, w.query.Packet[wire.HeaderLen:wire.HeaderLen+n]...)
	}
	w.buf = append(w.buf, 0)
	w.answers++
	return target
}

// apex returns the pointer to the zone that a name without records is in, by the pointer
// to that name. An own name is a zone of its own where no setting says which zone it is
// in, since a table does not say where zones begin.
func (w *writer) apex(owner uint16, name wire.Name) uint16 {
	if w.zone == wire.Root {
		return owner
	}
	return owner + uint16(len(name)-len(w.zone)) //nolint:gosec // within the name
}

// soa writes the record that lets a resolver cache a negative answer (RFC 2308).
func (w *writer) soa(owner uint16) {
	if w.record(owner, dns.TypeSOA, len(w.soaData)) {
		w.buf = append(w.buf, w.soaData...)
		w.authority++
	}
}

// shuffled writes a record for each of the packed addresses, in an order drawn
// uniformly from all, so that clients that take the first spread over all. If not
// all fit it is a uniform sample.
func (w *writer) shuffled(owner, rrtype uint16, packed []byte) {
	size := wire.AddressLen(rrtype)
	first := len(w.buf) + fixedLen // where the first address comes to stand
	slot := func(i int) []byte { return w.buf[first+i*(fixedLen+size):][:size] }
	written := 0
	for i := 0; i*size < len(packed); i++ {
		address := packed[i*size:][:size]
		j := 0
		if i > 0 {
			j = rand.IntN(i + 1)
		}
		switch {
		case !w.truncated && w.record(owner, rrtype, size):
			// Fisher and Yates, inside out: the new one takes a random place, and
			// who had it goes to the end.
			w.buf = append(w.buf, address...)
			if j < written {
				copy(slot(written), slot(j))
				copy(slot(j), address)
			}
			written++
			w.answers++
		case j < written:
			// No room: the i-th stays out, or takes the place of a random one
			// (Vitter's reservoir), which keeps sample and order uniform.
			copy(slot(j), address)
		}
	}
}
