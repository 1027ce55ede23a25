package dnsproxy

import (
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// slow is the slow path: it returns the response to a query that [handler.fast] has left for
// later. It blocks for as long as a nameserver, or the first table, takes.
func (h *handler) slow(t *task) []byte {
	probe := t.usual && t.decision.action == actChaos
	if !probe { // a probe is no request of a client
		h.metrics.requests.Inc()
	}
	if !t.usual || probe {
		return h.respondUnusual(t)
	}
	response, result := h.respondSlow(t)
	h.note(t, result, response)
	h.metrics.countQuery(t.query.Type, t.from.over, result)
	return h.withProvenance(response, 0, t, result)
}

// respondSlow returns the response to a query that was decided on and that respond does not
// answer.
func (h *handler) respondSlow(t *task) ([]byte, outcome) {
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
	_, err := h.elsewhere(t)
	if err != nil {
		why := failureOf(err)
		t.found = &forward.Result{Err: err, Source: sourceSelf}
		return h.respondFailure(nil, q, why), outcome{why.rcode, sourceSelf}
	}
	h.askFor(t)
	t.ask.Client, t.ask.How = t.from.client(), t.from.over.how()
	if isTransfer(q.Type) && t.from.send != nil {
		t.ask.Send = h.sendTransferred(t)
	}
	found := h.forwarder.Answer(&t.ask)
	if found.Err == nil && t.from.hold != nil {
		if t.held = found.Size(); !t.from.hold(t.held) {
			return nil, outcome{found.Rcode(), found.Source}
		}
	}
	return h.respondResult(nil, t, &found)
}

// sendTransferred returns the function that sends one message of a zone transfer to the
// client, with the OPT record of this hop. A signature spans several messages, so the
// messages of a signed transfer are not changed.
func (h *handler) sendTransferred(t *task) func([]byte) error {
	if reply.Signed(t.query.AsSent()) {
		return t.from.send
	}
	edns := t.query.EDNS
	return func(message []byte) error { return t.from.send(reply.Hop(message, edns, h.ednsUDPSize)) }
}

// respondUnusual answers, with the DNS library, messages that do not have the shape that
// [wire.Query] describes, and questions of class CH. It is part of the slow path.
func (h *handler) respondUnusual(t *task) []byte {
	t.decision = decision{}
	req := new(dns.Msg)
	if err := req.Unpack(t.packet); err != nil {
		response := bareFailure(t.packet, dns.RcodeFormatError)
		h.noteUnusual(req, t, outcome{dns.RcodeFormatError, sourceSelf}, response)
		return response
	}
	response, source := h.respondMessage(req, t)
	qtype := dns.TypeNone
	if len(req.Question) > 0 {
		qtype = req.Question[0].Qtype
	}
	result := outcome{reply.Rcode(response), source}
	h.noteUnusual(req, t, result, response)
	h.metrics.countQuery(qtype, t.from.over, result)
	return response
}

// bareFailure returns a response with the header alone. The packet must be long enough for
// a header.
func bareFailure(packet []byte, rcode byte) []byte {
	resp := make([]byte, wire.HeaderLen)
	copy(resp, packet[:wire.FlagsOffset])
	resp[wire.FlagsOffset] = wire.QR | packet[wire.FlagsOffset]&(wire.OpcodeMask|wire.RD)
	resp[wire.FlagsOffset+1] = rcode
	return resp
}

// respondMessage returns the response to a message, and its source.
func (h *handler) respondMessage(req *dns.Msg, t *task) (response []byte, source string) {
	own := func(resp *dns.Msg) ([]byte, string) { return h.pack(resp, req, t.from.over), sourceSelf }
	d, decided := screen(req)
	switch {
	case decided && d.action == actForward:
		return h.respondOther(req, t)
	case decided:
		t.decision = d
		return own(h.failureMessage(req, d.failure()))
	case req.Question[0].Qclass == dns.ClassCHAOS:
		resp := h.chaosMessage(req, h.version, h.id)
		if resp.Rcode != dns.RcodeSuccess {
			t.decision = decision{action: actReject, rcode: resp.Rcode, reason: errOtherClass}
		}
		response, _ = own(resp)
		return response, sourceProbe
	}
	// A query with more than a question and an OPT record, such as a signed one. Answers
	// that are not forwarded equal the answers to the same query of the usual shape.
	again := &task{from: t.from, usual: true}
	if err := makeUsual(&again.query, req); err != nil {
		t.decision = decision{action: actReject, rcode: dns.RcodeFormatError, reason: err}
		return own(h.failureMessage(req, t.decision.failure()))
	}
	again.query.Sent = t.packet
	again.decision = h.decide(again.query.Question, h.table.Load(), new(table.Scratch))
	response, result, ok := h.respond(nil, again)
	if !ok {
		response, result = h.respondSlow(again)
		t.held = again.held
	}
	t.found, t.decision = again.found, again.decision
	return response, result.source
}

// respondOther forwards a message with an opcode other than QUERY to its original destination
// or, if it was not captured, to a nameserver for its name. It returns the response and its source.
func (h *handler) respondOther(req *dns.Msg, t *task) (response []byte, source string) {
	failed := func(err error, source string) ([]byte, string) {
		return h.pack(h.failureMessage(req, failureOf(err)), req, t.from.over), source
	}
	var name wire.Name
	if len(req.Question) > 0 {
		if packed, err := wire.PackName(req.Question[0].Name); err == nil {
			name = wire.Fold(packed)
		}
	}
	var server netip.AddrPort
	if t.from.original != nil {
		var err error
		if server, err = t.from.original(); err != nil {
			t.found = &forward.Result{Err: err, Source: sourceSelf}
			return failed(err, sourceSelf)
		}
	}
	found := h.forwarder.Answer(&forward.Query{
		Name: name, Message: t.packet, Server: server, Client: t.from.client(), How: t.from.over.how(),
	})
	t.found = &found
	if found.Err != nil {
		return failed(found.Err, found.Source)
	}
	relayed := reply.Hop(found.Relayed, req.IsEdns0() != nil, h.ednsUDPSize)
	copy(relayed, t.packet[:2]) // the ID
	return reply.Cut(relayed, h.limit(offered(req), t.from.over)), found.Source
}

// pack returns a response in wire form, within the bounds of its transport.
func (h *handler) pack(resp, req *dns.Msg, over transport) []byte {
	resp.Truncate(h.limit(offered(req), over))
	packed, err := resp.Pack()
	if err != nil { // not reached: it is made of a request that was unpacked
		return nil
	}
	return packed
}

// offered returns the UDP payload size that the client offers, 0 if it does not say.
func offered(req *dns.Msg) uint16 {
	if opt := req.IsEdns0(); opt != nil {
		return opt.UDPSize()
	}
	return 0
}

// makeUsual makes q the query of the usual shape that has the question of req.
func makeUsual(q *wire.Query, req *dns.Msg) error {
	msg := new(dns.Msg)
	msg.Id, msg.RecursionDesired, msg.CheckingDisabled = req.Id, req.RecursionDesired, req.CheckingDisabled
	msg.Question = req.Question
	if opt := req.IsEdns0(); opt != nil {
		msg.SetEdns0(opt.UDPSize(), opt.Do())
	}
	packet, err := msg.Pack()
	if err != nil || !q.Parse(packet) {
		return errQuestionName
	}
	return nil
}
