package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// holdTimeout is how long a query waits for the first table (BeforeSync).
const holdTimeout = 2 * time.Second

// BeforeSync says what happens to queries before the first table.
type BeforeSync string

// The values of BeforeSync.
const (
	// BeforeSyncForward forwards what is not below the cluster domain and holds
	// the rest for up to 2 s, then SERVFAIL. It is the zero value's meaning.
	BeforeSyncForward BeforeSync = "forward"
	// BeforeSyncHold holds every query for up to 2 s, then SERVFAIL.
	BeforeSyncHold BeforeSync = "hold"
	// BeforeSyncServfail answers SERVFAIL at once.
	BeforeSyncServfail BeforeSync = "servfail"
)

// ParseBeforeSync reads a BeforeSync as a setting gives it.
func ParseBeforeSync(s string) (BeforeSync, error) {
	switch b := BeforeSync(s); b {
	case BeforeSyncForward, BeforeSyncHold, BeforeSyncServfail:
		return b, nil
	}
	return "", fmt.Errorf("before-sync %q: want %s, %s or %s", s, BeforeSyncForward, BeforeSyncHold, BeforeSyncServfail)
}

// A handler answers one query at a time for every goroutine that calls it.
type handler struct {
	answerer
	forwarder  *forwarder
	metrics    *metrics
	beforeSync BeforeSync
	version    string
	id         string

	resolvConf atomic.Pointer[resolvConf]
	table      *atomic.Pointer[Table] // nil in it before the first push
	synced     chan struct{}          // closed when the first table is in use
}

// serve returns the response to a packet that [responder.respond] handed on, nil if
// there is none. It blocks for as long as a nameserver, or the first table, takes.
func (h *handler) serve(ctx context.Context, packet []byte, over transport) []byte {
	if len(packet) < headerLen || packet[flagsOffset]&bitQR != 0 {
		// Nothing good comes of answering an answer.
		h.metrics.dropped.Inc()
		return nil
	}
	h.metrics.requests.Inc()
	req := new(dns.Msg)
	if err := req.Unpack(packet); err != nil {
		return formatError(packet)
	}
	resp, source := h.answer(ctx, req)
	h.fit(resp, req, over)
	qtype := dns.TypeNone
	if len(req.Question) > 0 {
		qtype = req.Question[0].Qtype
	}
	h.metrics.countQuery(qtype, over, resp.Rcode, source)
	wire, err := resp.Pack()
	if err != nil { // a nameserver's reply that only it understands
		resp = h.failure(req, dns.RcodeServerFailure, dns.ExtendedErrorCodeInvalidData, err.Error())
		wire, _ = resp.Pack() // made of the request, which was packed before
	}
	return wire
}

// formatError returns the response to a packet of which only the header can be
// read.
func formatError(packet []byte) []byte {
	resp := make([]byte, headerLen)
	copy(resp, packet[:flagsOffset])
	resp[flagsOffset] = bitQR | packet[flagsOffset]&(maskOpcode|bitRD)
	resp[flagsOffset+1] = dns.RcodeFormatError
	return resp
}

// answer returns the response to req and the source it came from.
func (h *handler) answer(ctx context.Context, req *dns.Msg) (resp *dns.Msg, source string) {
	d := h.decideMessage(req)
	if d.action == actHold {
		d = h.hold(ctx, req)
	}
	return h.carryOut(ctx, req, d), d.source()
}

// decideMessage is decide for a whole message.
func (h *handler) decideMessage(req *dns.Msg) decision {
	if d, decided := h.screen(req); decided {
		return d
	}
	q := req.Question[0]
	wire, err := packName(q.Name)
	if err != nil {
		return decision{action: actReject, rcode: dns.RcodeFormatError, reason: errQuestionName}
	}
	return h.decide(question{name: fold(wire), qtype: q.Qtype, class: q.Qclass}, h.table.Load(), new(scratch))
}

// hold waits for the first table and decides again. What is held counts as in flight.
func (h *handler) hold(ctx context.Context, req *dns.Msg) decision {
	if !h.forwarder.acquire() {
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errTooManyQuery}
	}
	defer h.forwarder.release()
	timer := time.NewTimer(holdTimeout)
	defer timer.Stop()
	select {
	case <-h.synced:
		return h.decideMessage(req)
	case <-timer.C:
	case <-ctx.Done():
	}
	return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
}

// carryOut makes the response that d asks for.
func (h *handler) carryOut(ctx context.Context, req *dns.Msg, d decision) *dns.Msg {
	switch d.action {
	case actChaos:
		return h.chaos(req, h.version, h.id)
	case actPointers, actAddresses:
		return h.own(req, d)
	case actForward:
		return h.forward(ctx, req)
	case actExists:
		resp := h.forward(ctx, req)
		if resp.Rcode == dns.RcodeNameError {
			return h.own(req, d) // of no type that has any: NODATA
		}
		return resp
	case actReject, actHold:
	}
	code := dns.ExtendedErrorCodeOther
	switch {
	case d.rcode == dns.RcodeServerFailure:
		code = dns.ExtendedErrorCodeNotReady
	case d.reason == nil:
		return h.reply(req, d.rcode)
	}
	return h.failure(req, d.rcode, code, d.reason.Error())
}

// own answers an own name that a client asked for in an unusual way, by asking the
// usual way on its behalf: there is one code that makes such answers.
func (h *handler) own(req *dns.Msg, d decision) *dns.Msg {
	usual := new(dns.Msg)
	usual.Id, usual.RecursionDesired, usual.CheckingDisabled = req.Id, req.RecursionDesired, req.CheckingDisabled
	usual.Question = req.Question
	if opt := req.IsEdns0(); opt != nil {
		usual.SetEdns0(opt.UDPSize(), opt.Do())
	}
	var q query
	resp := new(dns.Msg)
	packet, err := usual.Pack()
	if err == nil && !q.parse(packet) {
		err = errQuestionName
	}
	if err == nil {
		err = resp.Unpack(h.respondOwn(nil, &q, d, dns.MaxMsgSize))
	}
	if err != nil { // not reached: the name was packed to decide
		return h.failure(req, dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, err.Error())
	}
	return resp
}

// forward returns a nameserver's reply, or a SERVFAIL that says why there is
// none.
func (h *handler) forward(ctx context.Context, req *dns.Msg) *dns.Msg {
	resp, err := h.forwarder.exchange(ctx, req, h.upstreams())
	if err == nil {
		resp.Compress = true
		return resp
	}
	code := dns.ExtendedErrorCodeNoReachableAuthority
	if errors.Is(err, errTooManyQuery) {
		code = dns.ExtendedErrorCodeOther
	}
	return h.failure(req, dns.RcodeServerFailure, code, err.Error())
}

func (h *handler) upstreams() []netip.AddrPort { return h.resolvConf.Load().servers }
