package dnsproxy

import (
	"encoding/binary"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// headerLen is the length of a DNS message's header (RFC 1035, section 4.1.1).
const headerLen = 12

// The bytes of a header that responses are made with, and the bits in them.
const (
	flagsOffset   = 2
	qdCountOffset = 4
	anCountOffset = 6
	nsCountOffset = 8
	arCountOffset = 10

	bitQR, bitAA, bitTC, bitRD = 0x80, 0x04, 0x02, 0x01 // of the first flags byte
	bitRA, bitAD, bitCD        = 0x80, 0x20, 0x10       // of the second
	maskOpcode, maskRcode      = 0x78, 0x0F
)

// optLen is the length of an OPT record without options (RFC 6891, section 6.1.2),
// and optDO the bit in its TTL that says DNSSEC OK.
const (
	optLen = 11
	optDO  = 0x8000
)

// A transport is what a query came over.
type transport uint8

// The transports, as metrics number them.
const (
	overUDP transport = iota
	overTCP
	transports
)

// String names the transport as metrics do.
func (t transport) String() string {
	if t == overUDP {
		return "udp"
	}
	return "tcp"
}

// A responder answers own names, wire form in and wire form out, for one reader
// at a time: it keeps the buffers that this takes, so that no query allocates.
type responder struct {
	handler *handler
	query   query
	scratch scratch
	// elsewhere reports whether the query was captured on its way to a nameserver that
	// the cache does not speak for. It may ask the kernel; nil says that no query was.
	elsewhere func() bool
	// full says that nothing can be handed on: what respond does not answer is dropped.
	full bool
}

func newResponder(h *handler) *responder { return &responder{handler: h} }

// respond appends to dst the response to a query that the table or the cache
// answers. ok is false for all others, and dst is as it was: queries to be
// forwarded, those before the first table, and whatever is rare or malformed, down
// to packets that are no query. Those are for [handler.serve].
//
// The response is in the bounds of its transport. respond keeps neither slice.
func (r *responder) respond(dst, packet []byte, over transport) (response []byte, ok bool) {
	q := &r.query
	if !q.parse(packet) {
		return dst, false
	}
	h := r.handler
	table := h.table.Load()
	if table == nil {
		return dst, false
	}
	switch d := h.decide(q.question, table, &r.scratch); d.action {
	case actAddresses, actPointers:
		h.metrics.countAnswer(q.qtype, over, dns.RcodeSuccess, sourceTable)
		return h.respondOwn(dst, q, d, h.limit(q.udpSize, over)), true
	case actSpecial:
		h.metrics.requests.Inc()
		response = h.respondSpecial(dst, q, d.zone, h.limit(q.udpSize, over))
		h.metrics.countQuery(q.qtype, over, reply.Rcode(response[len(dst):]), sourceSelf)
		return response, true
	case actForward:
		return r.respondCached(dst, over)
	default:
		return dst, false
	}
}

// respondCached is respond for a name that is not the table's.
func (r *responder) respondCached(dst []byte, over transport) (response []byte, ok bool) {
	q, h := &r.query, r.handler
	var found resolution
	if q.cacheable() {
		found, ok = h.forwarder.tryCached(h.key(q))
		// What has expired is good enough if the query cannot be handed on.
		ok = ok || r.full && found.reply != nil
		if ok && found.err == nil && !r.goesElsewhere() {
			h.metrics.countAnswer(q.qtype, over, found.reply.Rcode(), sourceCache)
			request := h.request(q, h.limit(q.udpSize, over))
			return found.reply.Append(dst, &request, found.age), true
		}
	}
	if r.full || found.reply == nil && found.err == nil && h.forwarder.overloaded(q.name) && !r.goesElsewhere() {
		// Said here, since a goroutine for each would cost what own names need.
		h.metrics.overflows.Inc()
		h.metrics.countAnswer(q.qtype, over, dns.RcodeServerFailure, sourceSelf)
		return h.respondFailure(dst, q, failureOf(errTooManyQuery)), true
	}
	return dst, false
}

// goesElsewhere calls elsewhere. It is asked last, when all else says that the query need
// not be handed on.
func (r *responder) goesElsewhere() bool { return r.elsewhere != nil && r.elsewhere() }

// respondOwn appends the response to a query for an own name, of at most limit
// bytes.
func (a *answerer) respondOwn(dst []byte, q *query, d decision, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit, zone: d.zone}
	if d.action == actPointers {
		w.pointers(d.match.ptr)
	} else {
		w.addresses(d.match)
	}
	return w.buf
}

// limit is how long a response may be: over UDP what the client offers to take
// (RFC 6891, section 6.2.3), within what we send; 0 is no offer.
func (a *answerer) limit(offered uint16, over transport) int {
	if over == overTCP {
		return dns.MaxMsgSize
	}
	return int(max(dns.MinMsgSize, min(offered, a.ednsUDPSize)))
}

// A query is a request of the shape that nearly all have: opcode QUERY, one
// question, nothing else but an OPT record of version 0. It points into the packet
// it was parsed from and is good for as long as that is.
type query struct {
	question
	packet      []byte
	unusual     []byte // the message as it came, if packet is not that
	questionEnd int    // where the question section ends in packet
	rd, cd      bool
	edns, do    bool
	udpSize     uint16 // what the client offers to take over UDP; 0 without edns
	options     bool   // EDNS options that say something to a nameserver
	folded      [maxNameLen]byte
}

// cacheable reports whether nameservers' replies are for all who ask the question:
// a query without RD asks what they have already, EDNS options are for the client
// alone, and so are zone transfers and whatever is signed.
func (q *query) cacheable() bool {
	switch q.qtype {
	case dns.TypeIXFR, dns.TypeAXFR, dns.TypeTKEY, dns.TypeTSIG:
		return false
	}
	return q.rd && !q.options && q.unusual == nil
}

// asCame returns the message as the client sent it.
func (q *query) asCame() []byte {
	if q.unusual != nil {
		return q.unusual
	}
	return q.packet
}

// A question is the one question of a query.
type question struct {
	name         wireName
	qtype, class uint16
}

// parse reads packet. It is false if that is of another shape.
func (q *query) parse(packet []byte) bool {
	if len(packet) < headerLen || packet[flagsOffset]&(bitQR|maskOpcode) != 0 {
		return false
	}
	counts := binary.BigEndian.Uint64(packet[4:])
	const oneQuestion, oneAdditional = 1 << 48, 1
	if counts&^oneAdditional != oneQuestion {
		return false
	}
	end := q.parseName(packet)
	if end < 0 || len(packet) < end+4 {
		return false
	}
	q.packet, q.unusual = packet, nil
	q.qtype = binary.BigEndian.Uint16(packet[end:])
	q.class = binary.BigEndian.Uint16(packet[end+2:])
	q.questionEnd = end + 4
	q.rd = packet[flagsOffset]&bitRD != 0
	q.cd = packet[flagsOffset+1]&bitCD != 0
	q.edns = counts&oneAdditional != 0
	if !q.edns {
		q.do, q.udpSize, q.options = false, 0, false
		return len(packet) == q.questionEnd
	}
	return q.parseOPT(packet[q.questionEnd:])
}

// parseName reads the question's name, which no reasonable client compresses, and
// returns where it ends in packet, or -1.
func (q *query) parseName(packet []byte) int {
	i := headerLen
	for i < len(packet) && packet[i] != 0 {
		next := i + 1 + int(packet[i])
		if packet[i] > maxLabelLen || next >= len(packet) || next-headerLen > maxNameLen {
			return -1
		}
		i = next
	}
	if i >= len(packet) {
		return -1
	}
	n := i - headerLen
	for j, c := range packet[headerLen:i] {
		q.folded[j] = foldByte(c)
	}
	// The name lives as long as the query, in its buffer: see the type's comment.
	q.name = wireName(unsafe.String(&q.folded[0], n))
	return i + 1
}

// parseOPT reads the OPT record that is all of b. Options are passed over, as
// those that are not known must be.
func (q *query) parseOPT(b []byte) bool {
	if len(b) < optLen || b[0] != 0 || binary.BigEndian.Uint16(b[1:]) != dns.TypeOPT {
		return false
	}
	q.udpSize = binary.BigEndian.Uint16(b[3:])
	q.do = binary.BigEndian.Uint16(b[7:])&optDO != 0
	const version = 6
	return b[version] == 0 && len(b) == optLen+int(binary.BigEndian.Uint16(b[9:])) && q.parseOptions(b[optLen:])
}

// parseOptions reads the EDNS options that are all of b. Those that are between
// the client and the server it talks to, which is us, say nothing to others:
// cookies (RFC 7873), keepalive (RFC 7828) and padding (RFC 7830).
func (q *query) parseOptions(b []byte) bool {
	q.options = false
	for len(b) > 0 {
		const optionHeader = 4
		if len(b) < optionHeader {
			return false
		}
		switch binary.BigEndian.Uint16(b) {
		case dns.EDNS0COOKIE, dns.EDNS0TCPKEEPALIVE, dns.EDNS0PADDING:
		default:
			q.options = true
		}
		next := optionHeader + int(binary.BigEndian.Uint16(b[2:]))
		if next > len(b) {
			return false
		}
		b = b[next:]
	}
	return true
}
