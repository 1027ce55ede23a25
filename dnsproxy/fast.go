package dnsproxy

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// The verdicts of the fast path.
const (
	answered verdict = iota // there is a response
	dropped                 // there is no response
	deferred                // the slow path answers
)

// A verdict says what the fast path has done with a query.
type verdict uint8

// Of every 1,024 queries that the fast path answers, it measures the time of only one. Measuring takes longer than the
// answer, because it reads the clock twice and adds to a histogram. If one query in 16 were measured, answers would be
// more than 5 % slower.
const measuredOf = 1024

// answerFast is the fast path. It runs on the goroutine that has read the query, and appends to dst the response to a
// query that need not wait. Answers from the table and the cache take no allocation. The length of the response is
// within the limit of its transport.
//
// All other queries are left to [handler.answerSlow], and dst is unchanged. Such queries are forwarded queries, queries
// before the first table, and rare or malformed queries.
func (f *front) answerFast(dst []byte, t *task) ([]byte, verdict) {
	h := f.inUse.Load()
	t.handler = h
	t.began, t.measured = h.seen.Start(), false
	if t.count++; t.count%measuredOf == 0 {
		t.measure()
	}
	t.usual = t.query.Parse(t.packet)
	if !t.usual {
		if len(t.packet) < wire.HeaderLen || t.packet[wire.FlagsOffset]&wire.QR != 0 {
			h.metrics.dropped.Inc() // two programs that answer answers would never stop
			return dst, dropped
		}
		t.measure()
		return dst, deferred
	}
	t.decision = h.decide(t.query.Question, h.table.Load(), &t.names)
	response, result, ok := h.respond(dst, t)
	if !ok {
		t.measure()
		return dst, deferred
	}
	if t.began != 0 || result.rcode != dns.RcodeSuccess || t.stale() || t.decision.vacant() || truncated(response[len(dst):]) {
		h.observe(t, result, response[len(dst):])
	}
	if t.decision.action != actForward {
		t.decision = decision{} // otherwise an idle goroutine would keep a previous table in memory
	}
	h.metrics.requests.Inc()
	h.metrics.count(result)
	return h.withProvenance(response, len(dst), t, result), answered
}

// respond appends to dst the response to a query. t must have the decision. If the query has to wait for a
// nameserver or the first table, respond reports false, and dst is unchanged.
func (h *handler) respond(dst []byte, t *task) (response []byte, result outcome, ok bool) {
	q, d := &t.query, &t.decision
	switch d.action {
	case actAddresses, actPointers:
		response, result.rcode = h.compose(dst, t, nil)
		return response, outcome{result.rcode, sourceTable}, true
	case actSpecial:
		response = h.respondSpecial(dst, q, d.zone, h.limit(q.UDPSize, t.from.protocol))
		return response, outcome{reply.Rcode(response[len(dst):]), sourceSelf}, true
	case actForward, actTarget, actUnless:
		t.outgoing, t.located = forward.Query{Name: d.askedName(q), Cacheable: q.Cacheable(), Otherwise: d.otherwise()}, false
		var found *forward.Result
		if t.outgoing.Cacheable { // otherwise the reply is only for this client
			t.outgoing.Key = forward.Key(q)
			t.outgoing.Key.Name = string(t.outgoing.Name)
			if found, ok = h.forwarder.Lookup(&t.outgoing); t.outgoing.RefreshDue() {
				h.forwarder.Refresh(&t.outgoing)
			}
		}
		switch {
		case ok && d.proceed(found):
			return h.respond(dst, t)
		case ok && !h.mayGoElsewhere(t):
			response, result = h.respondResult(dst, t, found)
			return response, result, true
		case !ok && t.outgoing.Stale() == nil && h.forwarder.Full(&t.outgoing) && !h.mayGoElsewhere(t):
			response, result = h.respondTooMany(dst, t, upstream.ErrSilent)
			return response, result, true
		}
	case actUnknown:
		response, result = h.respondUnknown(dst, t)
		return response, result, true
	case actGuarded:
		response, result = h.respondGuarded(dst, t)
		return response, result, true
	}
	return dst, outcome{}, false
}

// refuse appends the response to a query that answerFast has left to the slow path. It is called if no worker can take
// the query. The response is an expired reply if the cache has one, otherwise SERVFAIL. If the query is not to be
// forwarded, refuse reports false, and dst is unchanged.
func (h *handler) refuse(dst []byte, t *task) (response []byte, ok bool) {
	if !t.usual || !t.decision.forwards() {
		return dst, false
	}
	var result outcome
	if stale := t.outgoing.Stale(); stale != nil && !h.mayGoElsewhere(t) {
		response, result = h.respondResult(dst, t, stale)
	} else {
		response, result = h.respondTooMany(dst, t, forward.ErrTooMany)
	}
	h.observe(t, result, response[len(dst):])
	h.metrics.requests.Inc()
	h.metrics.count(result)
	return h.withProvenance(response, len(dst), t, result), true
}
