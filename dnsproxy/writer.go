package dnsproxy

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/nat64"
)

// An answerer makes the responses that do not come from a nameserver. It is immutable.
type answerer struct {
	nat64       *nat64.Finder
	ttl         uint32 // the TTL of every record, in seconds
	ednsUDPSize uint16 // length of the longest UDP response, in bytes
	soaData     []byte // data of the SOA record of negative answers, in wire form
}

// A received is what nameservers contribute to an answer: their reply about the target of the question's decision.
type received struct {
	*forward.Result
	exists bool // the name exists according to the table, but nameservers have no records of the type
	own    bool // the answer has AA and RA of this hop, and not of the nameserver
	keepAD bool // the answer has AD of the nameserver
	// If the first aliases records of the reply lead to a mesh host, via is the decision about this host. Its records
	// take the place of all other records of the reply.
	aliases int
	via     *decision
}

// compose appends to dst the answer to the question of a task, and returns its response code. The parts of the answer
// are, in this order:
//
//   - the CNAME records of the table, if the question's name is not the name that has the records;
//   - the records of the nameservers' reply r, or of the table if r is nil. If CNAME records in the reply lead to a mesh
//     host, only these, and then the records of the table;
//   - if there are no records, the SOA record of the reply or, without one, of this agent.
//
// A name that the table has, or has names below, exists: it is never NXDOMAIN. The answer is authoritative (AA) if all
// of it comes from the table. It says that recursion is available (RA), because this agent forwards.
func (a *answerer) compose(dst []byte, t *task, r *received) ([]byte, int) {
	q, d := &t.query, &t.decision
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: a.limit(q.UDPSize, t.from.protocol), zone: d.zone}
	w.begin()
	if r == nil {
		if d.match.Rule == table.RulePTR {
			w.pointers(d.match.Pointers)
		} else {
			w.host(questionName, &d.match, d.table)
		}
		return w.buf, w.end(wire.AA, dns.RcodeSuccess, nil)
	}
	owner := questionName
	if d.action == actTarget {
		owner = w.cnames(owner, &d.match)
	}
	if target := w.received(r, owner); r.via != nil {
		w.zone = wire.Root // which is for the name of the question
		w.host(target, &r.via.match, r.via.table)
		return w.buf, w.end(0, dns.RcodeSuccess, nil)
	}
	rcode := r.Rcode()
	if r.exists {
		if rcode = dns.RcodeSuccess; w.authority == 0 {
			w.soa(w.apex(owner, d.match.Owner(q.Name)))
		}
	}
	first, second := r.Reply.Flags()
	first &= wire.TC | wire.AA
	if r.own {
		first &^= wire.AA
	} else {
		w.noRA = wire.RA &^ second
	}
	if r.keepAD && !r.exists && !r.Age.Stale {
		w.ad = second & wire.AD
	}
	rcode = w.end(first, rcode, nil)
	if q.EDNS && !w.truncated {
		w.buf = r.Reply.AppendOptions(w.buf, r.Age.Stale)
	}
	return w.buf, rcode
}

// respondNegative appends to dst a response without answers. The response has at most limit bytes. But a query for the
// zone's SOA record gets that record as its answer.
func (a *answerer) respondNegative(dst []byte, q *wire.Query, n negative, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit}
	w.begin()
	tail := len(q.Name) - len(n.zone)
	w.soa(questionName + uint16(tail)) //nolint:gosec // within the question
	if tail == 0 && q.Type == dns.TypeSOA && n.rcode == dns.RcodeSuccess {
		w.answers, w.authority = w.authority, 0
	}
	w.end(wire.AA, n.rcode, nil)
	return w.buf
}

// respondFailure appends to dst the response to q for a failure. It always fits, because maxReason bounds its length.
func (a *answerer) respondFailure(dst []byte, q *wire.Query, f failure) []byte {
	w := writer{answerer: a, query: q, buf: append(dst, q.Packet[:q.QuestionEnd]...), start: len(dst)}
	var option []byte
	if q.EDNS && f.err != nil {
		option = wire.AppendExtendedError(nil, f.code, f.text())
	}
	w.end(0, f.rcode, option)
	return w.buf
}

// respondText returns a response to q with one TXT record. The TTL of the record is 0.
func (a *answerer) respondText(q *wire.Query, text string, limit int) []byte {
	w := writer{answerer: &answerer{ednsUDPSize: a.ednsUDPSize}, query: q, limit: limit}
	w.begin()
	if w.record(questionName, dns.TypeTXT, 1+len(text)) {
		w.buf = append(append(w.buf, byte(len(text))), text...) //nolint:gosec // an identity or a version
		w.answers++
	}
	w.end(wire.AA, dns.RcodeSuccess, nil)
	return w.buf
}

// respondSpecial appends to dst the response for a name in a special-use zone. The response has at most limit bytes.
func (a *answerer) respondSpecial(dst []byte, q *wire.Query, zone wire.Name, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit}
	n := negative{dns.RcodeNameError, zone}
	switch every := q.Type == dns.TypeANY; {
	case zone == wire.Localhost && (every || q.Type == dns.TypeA || q.Type == dns.TypeAAAA): // RFC 6761, section 6.3
		var m table.Match
		m.Host.V4, m.Host.V6 = net.IPv4(127, 0, 0, 1).To4(), net.IPv6loopback
		w.begin()
		w.host(questionName, &m, nil)
		w.end(wire.AA, dns.RcodeSuccess, nil)
		return w.buf
	case (q.Name == wire.Localhost4 || q.Name == wire.Localhost6) && (every || q.Type == dns.TypePTR):
		w.begin()
		w.pointers([]wire.Name{wire.Localhost})
		w.end(wire.AA, dns.RcodeSuccess, nil)
		return w.buf
	case zone == wire.Invalid || zone == wire.Onion:
		n.zone = wire.Root // the answer of the root servers
	case zone == wire.Localhost || q.Name == zone || zone == wire.ResolverArpa || wire.Localhost4.Below(q.Name):
		n.rcode = dns.RcodeSuccess
	}
	return a.respondNegative(dst, q, n, limit)
}

// limit returns how long a response may be, in bytes. Over UDP, this is the size that the client offers (RFC
// 6891, section 6.2.3), but at most ednsUDPSize and at least 512. offered is 0 if the client offers no size.
func (a *answerer) limit(offered uint16, protocol transport) int {
	if protocol == overTCP {
		return dns.MaxMsgSize
	}
	return int(max(dns.MinMsgSize, min(offered, a.ednsUDPSize)))
}

// A negative describes a negative answer. Its rcode is NXDOMAIN or, for NODATA, NOERROR. Its zone is the owner of
// the SOA record: the question's name or a suffix of it.
type negative struct {
	rcode int
	zone  wire.Name
}

// The names in the data of SOA records. The cluster domain is appended to them.
const (
	soaServer  wire.Name = "\x02ns\x03dns"
	soaMailbox wire.Name = "\x0ahostmaster"
)

// newSOAData returns the data of the SOA record of negative answers, in wire form. The names in the data
// are always in the cluster domain, whatever the zone is: no client looks at them.
func newSOAData(domain wire.Name, ttl uint32) []byte {
	data := append(append([]byte(soaServer), domain...), 0)
	data = append(append(append(data, soaMailbox...), domain...), 0)
	// The first four numbers are for secondary servers, which nametap does not have; RFC 1912
	// recommends the values.
	const serial, refresh, retry, expire = 1, 7200, 1800, 86400
	for _, n := range []uint32{serial, refresh, retry, expire, ttl} {
		data = binary.BigEndian.AppendUint32(data, n)
	}
	return data
}

// meantSpecial returns the suffixes that are in a special-use zone. A setting that mentions such a
// suffix gives it another meaning. For example, a host with Tor may have --upstream onion=….
func meantSpecial(suffixes []wire.Name) []wire.Name {
	return slices.DeleteFunc(slices.Clone(suffixes), func(s wire.Name) bool { return !s.Special() })
}

// A writer writes one response of nametap's own, in wire form.
type writer struct {
	*answerer
	query *wire.Query
	buf   []byte // holds the response from start on
	start int
	limit int // how long the response may be, in bytes
	// zone is the owner of the SOA record in negative answers: a suffix of the name that has no records. The root
	// stands for that name itself.
	zone wire.Name
	// How many records of each section were written. aliases counts the CNAME records at the beginning of the
	// answers.
	answers, authority, additional uint16
	aliases                        uint16
	truncated                      bool // a record did not fit
	ad, noRA                       byte // the AD bit if it is set, the RA bit if it is not
}

// questionName is the pointer to the question's name, as the client spelled it.
const questionName uint16 = wire.PointerBits | wire.HeaderLen

// fixedLen is the length of a record's fixed part: the owner as a pointer, type, class, TTL
// and data length.
const fixedLen = 12

// host writes the CNAME records of a match for the name at owner, and the records of the queried type; t is the table of
// the match. If the host has no such records, it writes the SOA record that lets clients cache the negative answer (RFC
// 2308), without a CNAME record to an FQDN. glibc would end its search at a CNAME record, although with a later domain of
// the search list the name may have such records.
func (w *writer) host(owner uint16, m *table.Match, t *table.Table) {
	start, before, limit := len(w.buf), w.answers, w.limit
	target := w.cnames(owner, m)
	w.aliases = w.answers
	cut := w.truncated
	if w.query.Type == dns.TypeCNAME && (w.aliases > 0 || cut) {
		return // the CNAME record is the answer
	}
	if cut { // nothing more fits, and what is truncated now is a record of the queried type
		w.limit, w.truncated = len(w.buf)-w.start, false
	}
	switch qtype := w.query.Type; {
	case qtype == dns.TypeSRV:
		w.services(target, m, t)
	case qtype == dns.TypeANY:
		w.addresses(target, dns.TypeA, &m.Host)
		w.addresses(target, dns.TypeAAAA, &m.Host)
	case qtype == dns.TypeAAAA && len(m.Host.V6) == 0:
		w.translated(target, &m.Host)
	case qtype == dns.TypeA, qtype == dns.TypeAAAA:
		w.addresses(target, qtype, &m.Host)
	}
	w.limit = limit
	switch {
	case w.answers > w.aliases || w.truncated:
	case m.Target != wire.Root:
		w.buf, w.answers = w.buf[:start], before
		w.soa(owner)
	case cut:
		w.truncated = true
	default:
		w.soa(w.apex(target, m.Owner(w.query.Name)))
	}
}

// received writes records of a nameserver's reply. owner points to the name that the reply is about. The result points
// to the name that the reply's aliases lead to, if r.via is set.
func (w *writer) received(r *received, owner uint16) (target uint16) {
	place := reply.Place{Start: w.start, Owner: int(owner &^ wire.PointerBits), Limit: w.limit}
	n, age := r.Reply.Records(), r.Age
	switch {
	case w.truncated:
		n = 0
	case r.via != nil:
		n = r.aliases
		at := r.Reply.Target(n-1, w.buf, place)
		target = wire.PointerBits | uint16(min(at, wire.MaxPointer)) //nolint:gosec // within 14 bits
		w.truncated = at > wire.MaxPointer
	case w.query.EDNS:
		place.Options = r.Reply.OptionsLen(age.Stale)
	}
	if r.exists { // the table may have records soon
		age = age.Within(w.ttl)
	}
	var counts [wire.Sections]uint16
	var cut bool
	w.buf, counts, cut = r.Reply.Append(w.buf, place, n, age)
	w.truncated = w.truncated || cut
	w.answers += counts[wire.AnswerSection]
	w.authority += counts[wire.AuthoritySection]
	w.additional += counts[wire.AdditionalSection]
	return target
}

// pointers writes the records for the PTR name of an address. names are the hosts that have this address.
func (w *writer) pointers(names []wire.Name) {
	if w.query.Type != dns.TypePTR && w.query.Type != dns.TypeANY {
		w.soa(w.apex(questionName, w.query.Name))
		return
	}
	for _, name := range names {
		if !w.record(questionName, dns.TypePTR, len(name)+1) {
			break
		}
		w.buf = append(append(w.buf, name...), 0)
		w.answers++
	}
}

// begin copies the header and the question of the query, and reserves room for the OPT
// record.
func (w *writer) begin() {
	w.buf = append(w.buf, w.query.Packet[:w.query.QuestionEnd]...)
	if w.query.EDNS {
		w.limit -= wire.OPTLen
	}
}

// end writes the OPT record, with option as its options, and completes the header. flags has the AA and TC bits. end
// returns the response code. Without an OPT record, a response has only the low four bits of the code, and they may mean
// something else: BADVERS (16) would become NOERROR (0). Then the code becomes SERVFAIL.
func (w *writer) end(flags byte, rcode int, option []byte) int {
	if !w.query.EDNS && rcode > wire.RcodeMask {
		rcode = dns.RcodeServerFailure
	}
	if w.query.EDNS {
		ttl := uint32(rcode>>4) << 24 //nolint:gosec // twelve bits
		if w.query.DO {
			ttl |= wire.OPTDO
		}
		w.buf = wire.AppendOPT(w.buf, w.ednsUDPSize, ttl)
		binary.BigEndian.PutUint16(w.buf[len(w.buf)-2:], uint16(len(option))) //nolint:gosec // at most maxReason
		w.buf = append(w.buf, option...)
		w.additional++
	}
	header := w.buf[w.start:]
	header[wire.FlagsOffset] = wire.QR | flags | header[wire.FlagsOffset]&(wire.OpcodeMask|wire.RD)
	// TC makes a client ask again over TCP. If the limit is already that of TCP, this would not help.
	if w.truncated && w.limit < dns.MaxMsgSize-wire.OPTLen {
		header[wire.FlagsOffset] |= wire.TC
	}
	header[wire.FlagsOffset+1] = wire.RA&^w.noRA | w.ad | header[wire.FlagsOffset+1]&wire.CD | byte(rcode&wire.RcodeMask)
	wire.PutCount(header, wire.AnswerSection, w.answers)
	wire.PutCount(header, wire.AuthoritySection, w.authority)
	wire.PutCount(header, wire.AdditionalSection, w.additional)
	return rcode
}

// record writes a record without its data. The caller then appends the data, dataLen bytes. If the whole record does
// not fit, record writes nothing, sets truncated and reports false.
func (w *writer) record(owner, rrtype uint16, dataLen int) bool {
	if w.truncated || !w.fits(fixedLen+dataLen) {
		w.truncated = true
		return false
	}
	w.buf = binary.BigEndian.AppendUint16(w.buf, owner)
	w.buf = binary.BigEndian.AppendUint16(w.buf, rrtype)
	w.buf = binary.BigEndian.AppendUint16(w.buf, w.query.Class)
	w.buf = binary.BigEndian.AppendUint32(w.buf, w.ttl)
	w.buf = binary.BigEndian.AppendUint16(w.buf, uint16(dataLen)) //nolint:gosec // at most 300
	return true
}

// fits reports whether n more bytes fit.
func (w *writer) fits(n int) bool { return len(w.buf)-w.start+n <= w.limit }

// cnames writes the CNAME records of a match for the name at owner: of a name that is not the host's FQDN, and of an
// alias, in this order. It returns a pointer to the target of the last record, or owner if it writes none.
//
// For an autopath name, the target of the CNAME record is the name without the search domain, as the client spelled
// it. For a short name it is the host's FQDN, also after a search domain, because systemd-resolved treats a CNAME record
// from a name to its own first label as a loop.
func (w *writer) cnames(owner uint16, m *table.Match) uint16 {
	if n := len(m.Target); n > 0 && w.record(owner, dns.TypeCNAME, n+1) {
		owner = w.pointer()
		if m.Short {
			w.buf = append(w.buf, m.Target...)
		} else {
			w.buf = append(w.buf, w.query.Packet[wire.HeaderLen:wire.HeaderLen+n]...)
		}
		w.buf = append(w.buf, 0)
		w.answers++
	}
	if w.query.Type == dns.TypeCNAME && w.answers > 0 {
		return owner // the answer is the first of them (RFC 1034, section 3.6.2)
	}
	alias := m.Alias(w.query.Name)
	if alias != wire.Root && w.record(owner, dns.TypeCNAME, len(alias)+1) {
		owner = w.pointer()
		w.buf = append(append(w.buf, alias...), 0)
		w.answers++
	}
	return owner
}

// pointer returns a pointer to the name that is written next. The offset of the name must be less than 1<<14.
func (w *writer) pointer() uint16 {
	return wire.PointerBits | uint16(len(w.buf)-w.start) //nolint:gosec // a pointer's 14 bits
}

// apex returns a pointer to the owner of the SOA record for a name without records. owner is a pointer to the
// name. A table does not say where zones begin. So the owner is the name itself, unless a setting gives its zone.
func (w *writer) apex(owner uint16, name wire.Name) uint16 {
	if w.zone == wire.Root {
		return owner
	}
	return owner + uint16(len(name)-len(w.zone)) //nolint:gosec // within the name
}

// soa writes the SOA record that lets a resolver cache a negative answer (RFC 2308).
func (w *writer) soa(owner uint16) {
	if w.record(owner, dns.TypeSOA, len(w.soaData)) {
		w.buf = append(w.buf, w.soaData...)
		w.authority++
	}
}

// addresses writes the records of a host that have the type rrtype, A or AAAA.
// Addresses in the agent's cluster come first, because many clients use only the first address.
func (w *writer) addresses(owner, rrtype uint16, h *table.Host) {
	near, others := h.Near(rrtype)
	for _, packed := range [...][]byte{near, others} {
		w.answers += w.shuffled(owner, rrtype, packed)
	}
}

// translated writes the AAAA records of a host that has IPv4 addresses only: its A records, with the addresses that lead
// there through the network's NAT64 (RFC 6147, section 5.1.7). There are none without a NAT64, and for a client that
// validates (section 5.5).
func (w *writer) translated(owner uint16, h *table.Host) {
	prefix := w.nat64.Prefix()
	if prefix == nil || w.query.CD {
		return
	}
	start, before := len(w.buf), w.answers
	w.addresses(owner, dns.TypeA, h)
	records, cut := bytes.Clone(w.buf[start:]), w.truncated
	w.buf, w.answers, w.truncated = w.buf[:start], before, false
	for record := range slices.Chunk(records, fixedLen+net.IPv4len) {
		address, ok := nat64.Translate(*prefix, [net.IPv4len]byte(record[fixedLen:]))
		if ok && w.record(owner, dns.TypeAAAA, len(address)) {
			w.buf = append(w.buf, address[:]...)
			w.answers++
		}
	}
	w.truncated = w.truncated || cut
}

// shuffled writes a record for each packed address, in random order. So clients that use only the first address are
// spread over all addresses. If the records do not all fit, shuffled writes a random sample. It returns the number of
// records that it has written.
func (w *writer) shuffled(owner, rrtype uint16, packed []byte) uint16 {
	size := wire.AddressLen(rrtype)
	all := len(packed) / size
	n := 0
	if !w.truncated {
		fit := (w.limit - (len(w.buf) - w.start)) / (fixedLen + size)
		n = min(all, max(fit, 0))
	}
	if all > maxShuffled*n {
		w.sample(owner, rrtype, packed, n)
	} else {
		w.shuffle(owner, rrtype, packed, n)
	}
	w.truncated = w.truncated || n < all
	return uint16(n) //nolint:gosec // in a message of at most 64 KiB
}

// If there are more than maxShuffled times as many addresses as fit, a random sample is drawn instead of shuffling all
// addresses. Shuffling would take too many random numbers for addresses that are left out.
const maxShuffled = 2

// shuffle shuffles the packed addresses and writes the first n of them.
func (w *writer) shuffle(owner, rrtype uint16, packed []byte, n int) {
	size := wire.AddressLen(rrtype)
	first := len(w.buf) + fixedLen // offset of the first address
	slot := func(i int) []byte { return w.buf[first+i*(fixedLen+size):][:size] }
	for i := 0; i*size < len(packed); i++ {
		address := packed[i*size:][:size]
		j := 0
		if i > 0 {
			j = rand.IntN(i + 1)
		}
		switch {
		case i < n:
			// Inside-out Fisher-Yates shuffle: the new address takes a random slot,
			// and the address in that slot moves to the end.
			w.address(owner, rrtype, address)
			if j < i {
				copy(slot(i), slot(j))
				copy(slot(j), address)
			}
		case j < n:
			// Vitter's reservoir sampling: the i-th address is left out or replaces a
			// random one. So every sample, in every order, stays equally likely.
			copy(slot(j), address)
		}
	}
}

// maxSampled bounds the number of addresses from which a sample is drawn. If there are more, the sample is drawn
// from maxSampled consecutive addresses, the first of which is chosen at random.
const maxSampled = 1 << 14

// sample writes a random sample of n of the packed addresses. There must be more than maxShuffled times n addresses.
func (w *writer) sample(owner, rrtype uint16, packed []byte, n int) {
	var taken [maxSampled / 64]uint64
	size := wire.AddressLen(rrtype)
	all := len(packed) / size
	first := 0
	if all > maxSampled {
		first = rand.IntN(all)
	}
	for n > 0 {
		i := rand.IntN(min(all, maxSampled))
		if bit := uint64(1) << (i % 64); taken[i/64]&bit == 0 {
			taken[i/64] |= bit
			w.address(owner, rrtype, packed[(first+i)%all*size:][:size])
			n--
		}
	}
}

// address writes the record of an address. The record must fit.
func (w *writer) address(owner, rrtype uint16, packed []byte) {
	w.record(owner, rrtype, len(packed))
	w.buf = append(w.buf, packed...)
}

// srvFixedLen is the length in bytes of an SRV record's data before the target: priority, weight
// and port (RFC 2782).
const srvFixedLen = 6

// services writes the SRV records of the ports of a Service or an endpoint, and the addresses of their targets as
// additional records. If not all addresses fit, some are left out, and the response does not count as truncated
// (RFC 2181, section 9). If t is nil, services writes nothing.
//
// Priority and weight have the same values as in CoreDNS: the priority is 0, and all weights are equal. The first
// target is chosen at random.
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
	next := start - w.start // the offset of the next SRV record
	t.Targets(m, first, func(target table.Target) bool {
		if written--; written < 0 {
			return false
		}
		name := next + fixedLen + srvFixedLen
		next = name + target.NameLen() + 1
		return name <= wire.MaxPointer && (target.Repeated || w.targetAddresses(name, &target))
	})
}

// targetAddresses writes the addresses of a target as additional records. name is the offset of
// the target's name in the message. If the addresses do not all fit, it writes none and reports
// false.
func (w *writer) targetAddresses(name int, target *table.Target) bool {
	size := func(rrtype uint16, packed []byte) int {
		return len(packed) / wire.AddressLen(rrtype) * (fixedLen + wire.AddressLen(rrtype))
	}
	if !w.fits(size(dns.TypeA, target.V4) + size(dns.TypeAAAA, target.V6)) {
		return false
	}
	owner := wire.PointerBits | uint16(name) //nolint:gosec // at most MaxPointer
	w.additional += w.shuffled(owner, dns.TypeA, target.V4)
	w.additional += w.shuffled(owner, dns.TypeAAAA, target.V6)
	return true
}

// hasServices reports whether the table t has SRV records for name. m is the match of name in t. t may be nil.
func hasServices(m *table.Match, name wire.Name, t *table.Table) bool {
	return t != nil && t.CountTargets(t.Aliased(m, name)) > 0
}
