package dnsproxy

import (
	"errors"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// failureOf returns the failure for an error of forwarding.
func failureOf(err error) failure {
	f := failure{rcode: dns.RcodeServerFailure, code: dns.ExtendedErrorCodeNoReachableAuthority, err: err}
	var cached forward.CachedFailure
	switch {
	case errors.As(err, &cached):
		f.code = dns.ExtendedErrorCodeCachedError
	case errors.Is(err, forward.ErrEcho):
		// Refused, since a forwarder that gets no answer asks again.
		f.rcode, f.code = dns.RcodeRefused, dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrTooMany), errors.Is(err, errOrigin):
		f.code = dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrBadReply), errors.Is(err, upstream.ErrMalformed):
		f.code = dns.ExtendedErrorCodeInvalidData
	}
	return f
}

// respondTooMany appends the response to a query that is refused because too many are in
// flight, and counts it.
func (h *handler) respondTooMany(dst []byte, t *task) ([]byte, outcome) {
	h.forwarder.Overflow()
	why := failureOf(forward.ErrTooMany)
	return h.respondFailure(dst, &t.query, why), outcome{why.rcode, sourceSelf}
}

// respondUnknown appends the response for a local-only name that is not in the table.
func (h *handler) respondUnknown(dst []byte, t *task) ([]byte, outcome) {
	n := negative{dns.RcodeNameError, t.decision.zone}
	if t.decision.exists(t.query.Name) {
		n.rcode = dns.RcodeSuccess
	}
	return h.respondNegative(dst, &t.query, n, h.limit(t.query.UDPSize, t.from.over)), outcome{n.rcode, sourceSelf}
}

// respondResult appends the response that the forwarder has found.
func (h *handler) respondResult(dst []byte, t *task, found *forward.Result) ([]byte, outcome) {
	q, d, limit := &t.query, &t.decision, h.limit(t.query.UDPSize, t.from.over)
	switch {
	case errors.Is(found.Err, forward.ErrAbsent):
		return h.respondUnknown(dst, t)
	case found.Err != nil:
		why := failureOf(found.Err)
		return h.respondFailure(dst, q, why), outcome{why.rcode, found.Source}
	case d.action == actExists && found.Rcode() == dns.RcodeNameError:
		// The name exists, but has no records of this type anywhere: NODATA.
		return h.respondMesh(dst, q, d, limit), outcome{dns.RcodeSuccess, sourceTable}
	case found.Relayed != nil:
		// Of the slow path alone, which has no dst.
		response := reply.Cut(reply.Hop(found.Relayed, q.EDNS, h.ednsUDPSize), limit)
		return response, outcome{reply.Rcode(response), found.Source}
	}
	request := reply.Request{
		Query: q.Packet[:q.QuestionEnd], EDNS: q.EDNS, DO: q.DO,
		UDPSize: h.ednsUDPSize, KeepAD: h.forwarder.TrustAD(), Limit: limit,
	}
	result := outcome{found.Rcode(), found.Source}
	if !q.EDNS && result.rcode > wire.RcodeMask {
		result.rcode = dns.RcodeServerFailure // as in the response, whose header has four bits for it
	}
	return found.Reply.Append(dst, &request, found.Age), result
}

// respondMesh appends the response to a query for a mesh name, of at most limit bytes.
func (a *answerer) respondMesh(dst []byte, q *wire.Query, d *decision, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit, zone: d.zone}
	if d.action == actPointers {
		w.pointers(d.match.Pointers)
	} else {
		w.addresses(&d.match)
	}
	return w.buf
}
