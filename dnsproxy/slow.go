package dnsproxy

import (
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// answerSlow is the slow path. It returns the response to a query that [front.answerFast] has left to it. It may have
// to wait for a nameserver, or for the first table.
func (h *handler) answerSlow(t *task) []byte {
	if !t.usual || t.decision.action != actChaos { // class CH: probes are not counted as requests of clients
		h.metrics.requests.Inc()
	}
	respond := h.respondSlow
	if !t.usual {
		respond = h.respondUnusual
	}
	response, result := respond(t)
	h.observe(t, result, response)
	h.metrics.count(result)
	return h.withProvenance(response, 0, t, result)
}

// respondSlow returns the response to a query for which [handler.respond] has reported false. t must have the decision.
func (h *handler) respondSlow(t *task) ([]byte, outcome) {
	if t.decision.action == actHold {
		t.decision = h.hold(t)
		if response, result, ok := h.respond(nil, t); ok {
			return response, result
		}
	}
	switch {
	case t.decision.forwards():
		return h.forward(t)
	case t.decision.action == actChaos:
		return h.respondChaos(t)
	}
	return h.respondFailure(nil, &t.query, t.decision.failure()), outcome{t.decision.rcode, sourceSelf}
}

// respondChaos answers questions of class CH for the server's version and identity (RFC 4892), and refuses all other
// questions of that class.
func (h *handler) respondChaos(t *task) ([]byte, outcome) {
	q, text := &t.query, ""
	switch q.Name.String() {
	case "version.bind.", "version.server.":
		text = h.version
	case "id.server.", "hostname.bind.":
		text = h.id
	case "agent.nametap.": // no other server answers this one
		text = h.version + " " + h.id
	}
	if text == "" || q.Type != dns.TypeTXT && q.Type != dns.TypeANY {
		t.decision = decision{action: actReject, rcode: dns.RcodeRefused, reason: errOtherClass}
		failed := failure{dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, errOtherClass}
		return h.respondFailure(nil, q, failed), outcome{failed.rcode, sourceProbe}
	}
	return h.respondText(q, text, h.limit(q.UDPSize, t.from.protocol)), outcome{dns.RcodeSuccess, sourceProbe}
}

// hold waits for the first table, and then decides again. While a query waits, it counts as a query in flight.
func (h *handler) hold(t *task) decision {
	release, ok := h.forwarder.Hold()
	if !ok {
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: forward.ErrTooMany}
	}
	defer release()
	timer := time.NewTimer(min(holdTimeout, holdUntil-time.Since(h.began)))
	defer timer.Stop()
	select {
	case <-h.synced:
		return h.decideSlow(t)
	case <-timer.C:
	}
	return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
}

// decideSlow decides on a query that may be signed. Under a guard, no signed query leaves, because it would be for its own
// name whatever the decision is.
func (h *handler) decideSlow(t *task) decision {
	d := h.decide(t.query.Question, h.table.Load(), &t.names)
	if d.forwards() && signed(&t.query) && h.guard.Policy().Enforces() {
		return decision{action: actReject, match: d.match, rcode: dns.RcodeRefused, reason: errGuarded}
	}
	return d
}

// forward returns the response to a query that is not in the cache.
func (h *handler) forward(t *task) ([]byte, outcome) {
	if _, err := h.elsewhere(t); err != nil {
		return h.respondResult(nil, t, &forward.Result{Err: err, Source: sourceSelf})
	}
	h.setMessage(t)
	t.outgoing.Mode = t.from.protocol.mode()
	if isTransfer(t.query.Type) && t.from.send != nil {
		t.outgoing.Send = h.sendTransferred(t)
	}
	found := h.forwarder.Answer(&t.outgoing)
	if !signed(&t.query) && t.decision.proceed(&found) {
		if response, result, ok := h.respond(nil, t); ok {
			return response, result
		}
		return h.forward(t)
	}
	if found.Err == nil && t.from.hold != nil {
		if t.heldBytes = found.Size(); !t.from.hold(t.heldBytes) {
			return nil, outcome{found.Rcode(), found.Source}
		}
	}
	return h.respondResult(nil, t, &found)
}

// sendTransferred returns a function that sends one message of a zone transfer to the client. Each message gets this
// agent's OPT record. But the messages of a signed transfer are not changed: the signature covers them.
func (h *handler) sendTransferred(t *task) func([]byte) error {
	if reply.Signed(t.query.AsSent()) {
		return t.from.send
	}
	edns := t.query.EDNS
	return func(message []byte) error { return t.from.send(reply.Hop(message, edns, h.ednsUDPSize)) }
}

// respondUnusual returns the response to a message that does not have the shape that [wire.Query] describes. For
// this it sets t.query to a query of the usual shape with the first question of the message.
func (h *handler) respondUnusual(t *task) ([]byte, outcome) {
	req := new(dns.Msg)
	malformed := req.Unpack(t.packet)
	usual := makeUsual(&t.query, req)
	t.query.Sent = t.packet
	d, decided := screen(req)
	switch {
	case malformed != nil:
		t.decision = decision{action: actReject, rcode: dns.RcodeFormatError}
	case decided && d.action == actForward && h.guard.Policy().Enforces():
		t.decision = decision{action: actReject, rcode: dns.RcodeRefused, reason: errGuarded}
	case decided && d.action == actForward:
		t.decision = decision{}
		return h.respondOther(t)
	case decided:
		t.decision = d
	case !usual:
		t.decision = decision{action: actReject, rcode: dns.RcodeFormatError, reason: errQuestionName}
	default: // a query with more than a question and an OPT record, such as a signed one
		t.decision = h.decideSlow(t)
		if response, result, ok := h.respond(nil, t); ok {
			return response, result
		}
	}
	return h.respondSlow(t)
}

// respondOther forwards a message with an opcode other than QUERY to its original destination.
// If the message was not captured, it goes to a nameserver for its name.
func (h *handler) respondOther(t *task) ([]byte, outcome) {
	found := forward.Result{Source: sourceSelf}
	var server netip.AddrPort
	if t.from.original != nil {
		server, found.Err = t.from.original()
	}
	if found.Err == nil {
		found = h.forwarder.Answer(&forward.Query{
			Name: t.query.Name, Message: t.packet, Server: server, Mode: t.from.protocol.mode(),
		})
	}
	return h.respondResult(nil, t, &found)
}

// makeUsual sets q to a query of the usual shape that has the first question of req. If req has an OPT record, q has
// it, too, but without options. If this is not possible, makeUsual reports false; then q can only be used to make a
// failure response.
func makeUsual(q *wire.Query, req *dns.Msg) bool {
	*q = wire.Query{}
	msg := new(dns.Msg)
	msg.Id, msg.Opcode = req.Id, req.Opcode
	msg.RecursionDesired, msg.CheckingDisabled = req.RecursionDesired, req.CheckingDisabled
	msg.Question = req.Question[:min(len(req.Question), 1)]
	opt := req.IsEdns0()
	if opt != nil {
		msg.SetEdns0(opt.UDPSize(), opt.Do())
	}
	packet, err := msg.Pack()
	if err != nil { // the name cannot be packed again
		msg.Question = nil
		packet, _ = msg.Pack() // a header and an OPT record
	}
	if q.Parse(packet) {
		return true
	}
	q.Packet, q.QuestionEnd = packet, len(packet)
	if opt != nil {
		q.QuestionEnd -= wire.OPTLen
		q.EDNS, q.DO, q.UDPSize = true, opt.Do(), opt.UDPSize()
	}
	for _, question := range msg.Question {
		if name, err := wire.PackName(question.Name); err == nil {
			q.Name, q.Type, q.Class = wire.Fold(name), question.Qtype, question.Qclass
		}
	}
	return false
}

// bareFailure returns a response that has only a header. The packet must be long enough for a header.
func bareFailure(packet []byte, rcode byte) []byte {
	resp := make([]byte, wire.HeaderLen)
	copy(resp, packet[:wire.FlagsOffset])
	resp[wire.FlagsOffset] = wire.QR | packet[wire.FlagsOffset]&(wire.OpcodeMask|wire.RD)
	resp[wire.FlagsOffset+1] = rcode
	return resp
}
