package dnsproxy

import (
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// holdTimeout is how long a query waits for the first table (BeforeSync).
const holdTimeout = 2 * time.Second

// A handler answers one query at a time for every goroutine that calls it.
type handler struct {
	answerer
	forwarder  *forward.Forwarder
	metrics    *metrics
	beforeSync BeforeSync
	autopath   Autopath
	suffixes   table.Suffixes
	// meantSpecial are the suffixes within special-use zones that settings name.
	meantSpecial []wire.Name
	version      string
	id           string
	log          *slog.Logger

	// origins says where captured queries were on their way to; nil if that is of no
	// account.
	origins *origins

	table  *atomic.Pointer[table.Table] // nil in it before the first push
	synced chan struct{}                // closed when the first table is in use
}

// An arrival is how a query came.
type arrival struct {
	over transport
	// original returns the nameserver that a captured query was on its way to; it is
	// not valid if the query was not captured. After an error nothing is known. nil says
	// that the query was not captured.
	original func() (netip.AddrPort, error)
	// send sends a message of a response that has several, but not the last; nil over UDP.
	send func(message []byte) error
}

// serve returns the response to a packet that [responder.respond] handed on, nil if
// there is none. It blocks for as long as a nameserver, or the first table, takes.
func (h *handler) serve(packet []byte, from *arrival) []byte {
	if len(packet) < wire.HeaderLen || packet[wire.FlagsOffset]&wire.QR != 0 {
		// Nothing good comes of answering an answer.
		h.metrics.dropped.Inc()
		return nil
	}
	h.metrics.requests.Inc()
	var q wire.Query
	if !q.Parse(packet) || q.Class == dns.ClassCHAOS {
		return h.serveUnusual(packet, from)
	}
	response, source := h.answer(&q, from)
	h.metrics.countQuery(q.Type, from.over, reply.Rcode(response), source)
	return response
}

// answer returns the response to a query, and its source.
func (h *handler) answer(q *wire.Query, from *arrival) (response []byte, source string) {
	d := h.decide(q.Question, h.table.Load(), new(table.Scratch))
	if d.action == actHold {
		d = h.hold(q.Question)
	}
	limit := h.limit(q.UDPSize, from.over)
	switch d.action {
	case actPointers, actAddresses:
		return h.respondOwn(nil, q, d, limit), sourceTable
	case actSpecial:
		return h.respondSpecial(nil, q, d.zone, limit), sourceSelf
	case actForward, actExists, actUnknown:
		return h.forward(q, d, from)
	case actReject, actHold, actChaos:
	}
	return h.respondFailure(nil, q, d.failure()), sourceSelf
}

// hold waits for the first table and decides again. What is held counts as in flight.
func (h *handler) hold(q wire.Question) decision {
	release, ok := h.forwarder.Hold()
	if !ok {
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: forward.ErrTooMany}
	}
	defer release()
	timer := time.NewTimer(holdTimeout)
	defer timer.Stop()
	select {
	case <-h.synced:
		return h.decide(q, h.table.Load(), new(table.Scratch))
	case <-timer.C:
	}
	return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
}

// forward returns the response to a query that is not, or not only, for the table,
// and its source.
func (h *handler) forward(q *wire.Query, d decision, from *arrival) (response []byte, source string) {
	limit := h.limit(q.UDPSize, from.over)
	if d.exists(q.Name) {
		return h.respondNegative(nil, q, negative{dns.RcodeSuccess, d.zone}, limit), sourceSelf
	}
	server, err := h.elsewhere(from)
	walk := h.expandable(q)
	switch {
	case d.action == actUnknown && (err != nil || server.IsValid() || !walk):
		// A client of another nameserver walks the search list with that one.
		return h.respondNegative(nil, q, negative{dns.RcodeNameError, d.zone}, limit), sourceSelf
	case err != nil:
		return h.respondFailure(nil, q, failureOf(err)), sourceSelf
	}
	ask := h.question(q, walk)
	ask.Server, ask.How = server, from.over.how()
	if isTransfer(q.Type) && from.send != nil {
		ask.Send = h.sendTransferred(q, from.send)
	}
	if ask.Key.Walk != 0 {
		ask.Steps = h.steps(q.Question)
	}
	found := h.forwarder.Answer(ask)
	switch {
	case errors.Is(found.Err, forward.ErrAbsent):
		return h.respondNegative(nil, q, negative{dns.RcodeNameError, d.zone}, limit), sourceSelf
	case errors.Is(found.Err, forward.ErrEcho):
		// Refused, since a forwarder that gets no answer asks again.
		return h.respondFailure(nil, q, failure{dns.RcodeRefused, dns.ExtendedErrorCodeOther, found.Err}), found.Source
	case found.Err != nil:
		return h.respondFailure(nil, q, failureOf(found.Err)), found.Source
	case d.action == actExists && found.Rcode() == dns.RcodeNameError:
		return h.respondOwn(nil, q, d, limit), sourceTable // of no type that has any: NODATA
	case found.Relayed != nil:
		return reply.Cut(reply.Hop(found.Relayed, q.EDNS, h.ednsUDPSize), limit), found.Source
	}
	request := h.request(q, limit)
	return found.Reply.Append(nil, &request, found.Age), found.Source
}

// question returns a query for the forwarder, with what the cache has for it; walk says that
// the search list is walked.
func (h *handler) question(q *wire.Query, walk bool) *forward.Query {
	ask := &forward.Query{Name: q.Name, Message: q.AsSent(), Cacheable: q.Cacheable()}
	if ask.Cacheable {
		ask.Key = h.forwarder.Key(q, walk)
		h.forwarder.Lookup(ask)
		if ask.RefreshDue() {
			h.refresh(ask, q)
		}
	}
	return ask
}

// refresh asks nameservers for a reply that is about to expire.
func (h *handler) refresh(ask *forward.Query, q *wire.Query) {
	if ask.Key.Walk != 0 {
		ask.Steps = h.steps(q.Question)
	}
	h.forwarder.Refresh(ask)
}

// expandable reports whether the search list is walked for a query, whose name is not in
// the table: the rules are in the comment of package forward. The CNAME record that the
// answer begins with is not signed, so clients that validate walk themselves.
func (h *handler) expandable(q *wire.Query) bool {
	if h.autopath != AutopathAll || q.DO || q.CD || q.Type != dns.TypeA && q.Type != dns.TypeAAAA {
		return false
	}
	return h.forwarder.StartsWalk(q.Name)
}

// steps decides on each name of the walk for a question. The question's own name was
// decided before: it is forwarded, or it is local only.
func (h *handler) steps(q wire.Question) []forward.Step {
	names := h.forwarder.WalkNames(q.Name)
	steps := make([]forward.Step, len(names))
	current, scratch := h.table.Load(), new(table.Scratch)
	for i, name := range names {
		steps[i] = forward.Step{Name: name, Fate: forward.AnsweredHere}
		d := h.decide(wire.Question{Name: name, Type: q.Type, Class: q.Class}, current, scratch)
		switch d.action {
		case actForward:
			steps[i].Fate = forward.Forwarded
		case actUnknown:
			steps[i].Fate = forward.Absent
		default:
		}
	}
	return steps
}

// elsewhere returns the nameserver that a captured query goes to: its original destination,
// unless those of resolv.conf are asked instead. It is not valid if they are, or if the
// query was not captured.
func (h *handler) elsewhere(from *arrival) (netip.AddrPort, error) {
	if from.original == nil {
		return netip.AddrPort{}, nil
	}
	server, err := from.original()
	if err != nil || !h.forwarder.Elsewhere(server) {
		return netip.AddrPort{}, err
	}
	return server, nil
}

// mayGoElsewhere reports whether a captured query goes to its original destination, or may
// do so.
func (h *handler) mayGoElsewhere(from *arrival) bool {
	server, err := h.elsewhere(from)
	return err != nil || server.IsValid()
}

// sendTransferred returns what sends one message of a zone transfer to the client, with
// the OPT record of this hop. A signature is over several messages, so those of a signed
// transfer stay as they are.
func (h *handler) sendTransferred(q *wire.Query, send func([]byte) error) func([]byte) error {
	if reply.Signed(q.AsSent()) {
		return send
	}
	return func(message []byte) error { return send(reply.Hop(message, q.EDNS, h.ednsUDPSize)) }
}

// request returns what a response to q copies from it.
func (h *handler) request(q *wire.Query, limit int) reply.Request {
	return reply.Request{
		Query: q.Packet[:q.QuestionEnd], EDNS: q.EDNS, DO: q.DO,
		UDPSize: h.ednsUDPSize, KeepAD: h.forwarder.TrustAD(), Limit: limit,
	}
}

// serveUnusual serves what is no query of the usual shape, as a message.
func (h *handler) serveUnusual(packet []byte, from *arrival) []byte {
	req := new(dns.Msg)
	if err := req.Unpack(packet); err != nil {
		return bareFailure(packet, dns.RcodeFormatError)
	}
	response, source := h.answerUnusual(req, packet, from)
	qtype := dns.TypeNone
	if len(req.Question) > 0 {
		qtype = req.Question[0].Qtype
	}
	h.metrics.countQuery(qtype, from.over, reply.Rcode(response), source)
	return response
}

// bareFailure returns the response to a packet of which only the header is looked at. It
// is long enough for one.
func bareFailure(packet []byte, rcode byte) []byte {
	resp := make([]byte, wire.HeaderLen)
	copy(resp, packet[:wire.FlagsOffset])
	resp[wire.FlagsOffset] = wire.QR | packet[wire.FlagsOffset]&(wire.OpcodeMask|wire.RD)
	resp[wire.FlagsOffset+1] = rcode
	return resp
}

// answerUnusual returns the response to a message, whose packet is as it came, and
// its source.
func (h *handler) answerUnusual(req *dns.Msg, packet []byte, from *arrival) (response []byte, source string) {
	d, decided := h.screen(req)
	switch {
	case decided && d.action == actForward:
		return h.passOn(req, packet, from)
	case decided:
		return h.pack(h.failure(req, d.failure()), req, from.over), sourceSelf
	case req.Question[0].Qclass == dns.ClassCHAOS:
		return h.pack(h.chaos(req, h.version, h.id), req, from.over), sourceSelf
	}
	// A query with more than a question and an OPT record, such as one that is
	// signed. What we answer, we answer as if it had been asked the usual way.
	q, err := usual(req)
	if err != nil {
		return h.pack(h.failure(req, (&decision{action: actReject, rcode: dns.RcodeFormatError, reason: errQuestionName}).failure()), req, from.over), sourceSelf
	}
	q.Sent = packet
	return h.answer(q, from)
}

// passOn returns the response to a message that is no QUERY, and its source: that of
// the nameserver it was on its way to, or of the best of those for its name.
func (h *handler) passOn(req *dns.Msg, packet []byte, from *arrival) (response []byte, source string) {
	var name wire.Name
	if len(req.Question) > 0 {
		if packed, err := wire.PackName(req.Question[0].Name); err == nil {
			name = wire.Fold(packed)
		}
	}
	var server netip.AddrPort
	if from.original != nil {
		var err error
		if server, err = from.original(); err != nil {
			return h.pack(h.failure(req, failureOf(err)), req, from.over), sourceSelf
		}
	}
	found := h.forwarder.Answer(&forward.Query{Name: name, Message: packet, Server: server, How: from.over.how()})
	if found.Err != nil {
		return h.pack(h.failure(req, failureOf(found.Err)), req, from.over), found.Source
	}
	relayed := reply.Hop(found.Relayed, req.IsEdns0() != nil, h.ednsUDPSize)
	return reply.Cut(relayed, h.limit(offered(req), from.over)), found.Source
}

// pack returns a response of ours in wire form, within the bounds of its transport.
func (h *handler) pack(resp, req *dns.Msg, over transport) []byte {
	resp.Truncate(h.limit(offered(req), over))
	packed, err := resp.Pack()
	if err != nil { // not reached: it is made of a request that was unpacked
		return nil
	}
	return packed
}

// offered is what the client offers to take over UDP, 0 if it does not say.
func offered(req *dns.Msg) uint16 {
	if opt := req.IsEdns0(); opt != nil {
		return opt.UDPSize()
	}
	return 0
}

// usual returns the question of an unusual query as if it had been asked in the
// usual way: there is one code that makes such answers.
func usual(req *dns.Msg) (*wire.Query, error) {
	msg := new(dns.Msg)
	msg.Id, msg.RecursionDesired, msg.CheckingDisabled = req.Id, req.RecursionDesired, req.CheckingDisabled
	msg.Question = req.Question
	if opt := req.IsEdns0(); opt != nil {
		msg.SetEdns0(opt.UDPSize(), opt.Do())
	}
	packet, err := msg.Pack()
	if err != nil {
		return nil, err
	}
	q := new(wire.Query)
	if !q.Parse(packet) {
		return nil, errQuestionName
	}
	return q, nil
}
