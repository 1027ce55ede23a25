package dnsproxy

import (
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
)

// holdTimeout is how long a query waits for the first table (BeforeSync).
const holdTimeout = 2 * time.Second

// slow is the slow path: it returns the response to a query that [handler.fast] has left for
// later. It blocks for as long as a nameserver, or the first table, takes.
func (h *handler) slow(t *task) []byte {
	h.metrics.requests.Inc()
	if !t.usual || t.decision.action == actChaos {
		return h.serveUnusual(t)
	}
	response, result := h.answer(t)
	h.metrics.countQuery(t.query.Type, t.from.over, result)
	return response
}

// answer returns the response to a query that was decided on and that respond does not
// answer.
func (h *handler) answer(t *task) ([]byte, outcome) {
	if t.decision.action == actHold {
		t.decision = h.hold(t)
		if response, result, ok := h.respond(nil, t); ok {
			return response, result
		}
	}
	if t.decision.forwards() {
		return h.forward(t)
	}
	return h.respondFailure(nil, &t.query, t.decision.failure()), outcome{t.decision.rcode, sourceSelf}
}

// hold waits for the first table and decides again. A held query counts as in flight.
func (h *handler) hold(t *task) decision {
	release, ok := h.forwarder.Hold()
	if !ok {
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: forward.ErrTooMany}
	}
	defer release()
	timer := time.NewTimer(holdTimeout)
	defer timer.Stop()
	select {
	case <-h.synced:
		return h.decide(t.query.Question, h.table.Load(), new(table.Scratch))
	case <-timer.C:
	}
	return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
}

// forward returns the response to a query that is not in the cache.
func (h *handler) forward(t *task) ([]byte, outcome) {
	q := &t.query
	server, err := h.elsewhere(t)
	switch {
	case t.decision.action == actUnknown && (err != nil || server.IsValid()):
		// A client of another nameserver walks the search list with that one.
		return h.respondUnknown(nil, t)
	case err != nil:
		why := failureOf(err)
		return h.respondFailure(nil, q, why), outcome{why.rcode, sourceSelf}
	}
	t.ask.Message, t.ask.How = q.AsSent(), t.from.over.how()
	if isTransfer(q.Type) && t.from.send != nil {
		t.ask.Send = h.sendTransferred(t)
	}
	if t.ask.Key.Walk != 0 {
		t.ask.Steps = h.steps(t)
	}
	found := h.forwarder.Answer(&t.ask)
	return h.respondResult(nil, t, &found)
}

// sendTransferred returns the function that sends one message of a zone transfer to the
// client, with the OPT record of this hop. A signature spans several messages, so those of a
// signed transfer are not changed.
func (h *handler) sendTransferred(t *task) func([]byte) error {
	if reply.Signed(t.query.AsSent()) {
		return t.from.send
	}
	edns := t.query.EDNS
	return func(message []byte) error { return t.from.send(reply.Hop(message, edns, h.ednsUDPSize)) }
}
