package dnsproxy

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
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

// how returns how nameservers are asked as the client asked.
func (t transport) how() upstream.How {
	if t == overTCP {
		return upstream.TCPOnly
	}
	return upstream.UDPOnly
}

// A responder answers own names, wire form in and wire form out, for one reader
// at a time: it keeps the buffers that this takes, so that no query allocates.
type responder struct {
	handler *handler
	query   wire.Query
	scratch table.Scratch
	ask     forward.Query
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
	if !q.Parse(packet) {
		return dst, false
	}
	h := r.handler
	current := h.table.Load()
	if current == nil {
		return dst, false
	}
	switch d := h.decide(q.Question, current, &r.scratch); d.action {
	case actAddresses, actPointers:
		h.metrics.countAnswer(q.Type, over, dns.RcodeSuccess, sourceTable)
		return h.respondOwn(dst, q, d, h.limit(q.UDPSize, over)), true
	case actSpecial:
		h.metrics.requests.Inc()
		response = h.respondSpecial(dst, q, d.zone, h.limit(q.UDPSize, over))
		h.metrics.countQuery(q.Type, over, reply.Rcode(response[len(dst):]), sourceSelf)
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
	r.ask = forward.Query{Name: q.Name, Cacheable: q.Cacheable()}
	var found forward.Result
	if q.Cacheable() {
		r.ask.Key = h.forwarder.Key(q, h.expandable(q))
		found, ok = h.forwarder.Lookup(&r.ask)
		if r.ask.RefreshDue() {
			h.refresh(&r.ask, q)
		}
		// What has expired is good enough if the query cannot be handed on.
		ok = ok || r.full && found.Reply != nil
		if ok && found.Err == nil && !r.goesElsewhere() {
			h.metrics.countAnswer(q.Type, over, found.Reply.Rcode(), sourceCache)
			request := h.request(q, h.limit(q.UDPSize, over))
			return found.Reply.Append(dst, &request, found.Age), true
		}
	}
	if r.full || found.Reply == nil && found.Err == nil && h.forwarder.Overloaded(&r.ask) && !r.goesElsewhere() {
		// Said here, since a goroutine for each would cost what own names need.
		h.forwarder.Overflow()
		h.metrics.countAnswer(q.Type, over, dns.RcodeServerFailure, sourceSelf)
		return h.respondFailure(dst, q, failureOf(forward.ErrTooMany)), true
	}
	return dst, false
}

// goesElsewhere calls elsewhere. It is asked last, when all else says that the query need
// not be handed on.
func (r *responder) goesElsewhere() bool { return r.elsewhere != nil && r.elsewhere() }

// respondOwn appends the response to a query for an own name, of at most limit
// bytes.
func (a *answerer) respondOwn(dst []byte, q *wire.Query, d decision, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit, zone: d.zone}
	if d.action == actPointers {
		w.pointers(d.match.Pointers)
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
