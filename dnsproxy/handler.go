package dnsproxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/nat64"
)

// A handler answers queries. [front.answerFast] answers queries that need not wait, and [handler.answerSlow] answers
// all other queries. A handler is safe for concurrent use. It never changes: when settings change, a handler with the
// new settings takes its place in [front].
type handler struct {
	answerer
	rules
	*common

	guarded  answerer // the settings of the guard's answers
	guardSOA []byte   // the SOA record of the guard's negative answers, in wire form
}

// A front passes each query of the listeners to the handler that is in use when the query arrives.
type front struct {
	*common
	inUse atomic.Pointer[handler]
}

// newPacer returns the Pacer by which a listener waits before it retries after a transient error.
func newPacer(h *front, listener Addr) *listen.Pacer {
	return &listen.Pacer{Log: h.log, Listener: listener.String(), Count: h.metrics.listenerErrors.Inc}
}

// common has what handlers need besides the settings that may change. All handlers of a Server share it.
type common struct {
	forwarder *forward.Forwarder
	metrics   *metrics
	seen      *seen.Recorder
	version   string
	id        string
	log       *slog.Logger
	nat64     *nat64.Finder

	// origins finds the original destinations of captured queries.
	origins *origins

	table  atomic.Pointer[table.Table] // holds nil before the first push
	synced chan struct{}               // closed when the first table is in use
	began  time.Time                   // when the first table was expected (holdUntil)

	handOver atomic.Bool // set by Server.HandOver
}

// collisions returns the number of collisions in the current table.
func (c *common) collisions() float64 {
	if table := c.table.Load(); table != nil {
		return float64(len(table.Collisions()))
	}
	return 0
}

// An arrival says how a query came to the agent.
type arrival struct {
	protocol transport
	// client returns the address that the query came from.
	client func() netip.AddrPort
	// original returns the original destination of a captured query, or an address that is not
	// valid if the query was not captured. If original is nil, the query was not captured.
	original func() (netip.AddrPort, error)
	// local returns the address of the agent to which the query came.
	local func() netip.AddrPort
	// send sends one message of a zone transfer to the client. It is not called for the last message, because the
	// handler returns that message as its response. Over UDP, send is nil.
	send func(message []byte) error
	// hold is called before a response is made. It counts the n bytes of the response as memory of the connection,
	// and reports false if the connection was closed. It is nil over UDP.
	hold func(n int) bool
}

// SentTo implements [seen.Sent]. If the original destination of a TCP connection is unknown, the connection counts as
// not captured.
func (a *arrival) SentTo() (addr netip.AddrPort, sure bool) {
	if a.original != nil {
		if server, err := a.original(); err == nil && server.IsValid() {
			return server, true
		}
	}
	return a.local(), a.protocol == overTCP
}

// A task is a query on its way through a handler. It has the query's packet, and the results of the fast path,
// from which the slow path continues.
//
// A goroutine that reads queries uses one task for all queries that the fast path answers. If a query is for the slow
// path, the goroutine passes the task to a worker and allocates another one for itself. A task that was passed is not
// used again, because background work may need its names after the query is answered, and the names point to memory of
// the task. For the same reason a task must not be copied.
type task struct {
	packet  []byte
	from    *arrival
	handler *handler // set by front.answerFast

	usual     bool // the packet has the shape that wire.Query describes
	query     wire.Query
	decision  decision        // set if usual is true
	outgoing  forward.Query   // set if the decision is to forward
	located   bool            // the method elsewhere has set outgoing.Server
	heldBytes int             // bytes that from.hold has counted
	began     seen.Moment     // when the query was read; 0 if the clock was not read
	measured  bool            // the time since began goes into metrics
	count     uint32          // how many queries the goroutine has read, plus a random number
	found     *forward.Result // the result of the forwarder; nil if the forwarder was not asked
	source    *Provenance     // where found came from; set if the client asks for it

	names table.Scratch // memory for decision
	// Memory for [handler.consult].
	via     decision
	alias   [wire.MaxNameLen]byte
	scratch table.Scratch
}

// newTask returns the first task of a goroutine that reads queries. The field count begins at a random number: if it
// began at 0, a goroutine that reads few queries would never measure one.
func newTask() *task { return &task{count: rand.Uint32()} } //nolint:gosec // a sample

// begin makes t the task of a packet. t refers to the memory of the packet until the next call of begin or keep.
func (t *task) begin(packet []byte, from *arrival) {
	t.packet, t.from, t.located, t.found = packet, from, false, nil
}

// next returns a task for the query that the goroutine of t reads next.
func (t *task) next() *task { return &task{count: t.count} }

// keep prepares t for the slow path. packet must be a copy of t's packet, in memory that no other query
// uses.
func (t *task) keep(packet []byte, from *arrival) {
	t.packet, t.from = packet, from
	if t.usual {
		t.query.Packet = packet
	}
}

// measure makes the query's time go into metrics, and reads the clock if it was not read. The fast path calls it for a
// few of the queries that it answers. It also calls it for every query that it leaves to the slow path, because only
// such a query may be slow.
func (t *task) measure() {
	t.measured = true
	if t.began == 0 {
		t.began = t.handler.seen.Now()
	}
}

// stale reports whether the forwarder has found a stale reply.
func (t *task) stale() bool { return t.found != nil && t.found.Source == sourceStale }

// elsewhere returns the original destination of a captured query if the query is to be forwarded there. If the query
// was not captured, or goes to the nameservers of resolv.conf, the address is not valid.
func (h *handler) elsewhere(t *task) (netip.AddrPort, error) {
	if t.located || t.from.original == nil || h.origins.ignored() || h.guard.Policy().Enforces() {
		return t.outgoing.Server, nil
	}
	server, err := t.from.original()
	if err != nil {
		return netip.AddrPort{}, err
	}
	if h.forwarder.Elsewhere(server) {
		t.outgoing.Server = server
	}
	t.located = true
	return t.outgoing.Server, nil
}

// mayGoElsewhere reports whether a query is forwarded to its original destination. It also reports true if the
// lookup of that destination failed. Callers test all other conditions first, because the lookup may be a request to
// the kernel.
func (h *handler) mayGoElsewhere(t *task) bool {
	server, err := h.elsewhere(t)
	return err != nil || server.IsValid()
}

// setMessage sets the message of t.outgoing. The name and the key of t.outgoing must be set already.
func (h *handler) setMessage(t *task) {
	t.outgoing.Message = t.query.AsSent()
	if name := t.decision.askedName(&t.query); name != t.query.Name {
		q := &t.query
		message := wire.AppendQuestion(q.Packet[:wire.HeaderLen:wire.HeaderLen], name, q.Type, q.Class)
		t.outgoing.Message = append(message, q.Packet[q.QuestionEnd:]...)
	}
}

// respondResult appends the response for a result of the forwarder.
func (h *handler) respondResult(dst []byte, t *task, found *forward.Result) ([]byte, outcome) {
	q, d, limit := &t.query, &t.decision, h.limit(t.query.UDPSize, t.from.protocol)
	t.found = found
	if q.Provenance {
		t.source = provenanceOf(found, q.Trace)
	}
	unless := d.action == actUnless && !signed(q)
	if found.Relayed != nil {
		if signed(q) || isTransfer(q.Type) || t.packet[wire.FlagsOffset]&wire.OpcodeMask != 0 {
			response := reply.Hop(reply.Cut(bytes.Clone(found.Relayed), limit-wire.OPTLen), q.EDNS, h.ednsUDPSize)
			copy(response, t.packet[:2]) // the ID
			return response, outcome{reply.Rcode(response), found.Source}
		}
		one := *found
		one.Reply, one.Err = reply.ParseRelayed(found.Relayed)
		found = &one
	}
	switch {
	case h.judgeResult(t, found):
		return h.respondGuarded(dst, t)
	case unless && d.instead(found):
		return h.respondInstead(dst, t)
	case found.Err != nil:
		failed := failureOf(found.Err)
		return h.respondFailure(dst, q, failed), outcome{failed.rcode, found.Source}
	case unless && d.target != q.Name && found.Exists(): // a search domain made the question's name from the target
		d.zone = q.Name[min(len(d.target), len(q.Name)):]
		return h.respondUnknown(dst, t)
	}
	elsewhere := t.outgoing.Server.IsValid()
	r := &received{
		Result: found, exists: d.action == actTarget && found.Reply.Negative() && found.Reply.Answers() == 0,
		own: q.RD && !elsewhere, keepAD: (elsewhere || h.forwarder.TrustAD()) && d.action != actTarget,
	}
	if r.own && (found.Reply.Aliases() > 0 || found.Rcode() == dns.RcodeNameError) {
		h.consult(t, r)
	}
	if d.action == actTarget && d.match.Target != wire.Root && found.Reply.Negative() && r.via == nil {
		r = nil // the table answers, without a CNAME record: see writer.host
	}
	response, rcode := h.compose(dst, t, r)
	if r != nil && r.via != nil {
		t.via = decision{} // otherwise an idle goroutine would keep a previous table in memory
	}
	return response, outcome{rcode, found.Source}
}

// respondInstead appends the response for an actUnless if nameservers do not have the name.
func (h *handler) respondInstead(dst []byte, t *task) ([]byte, outcome) {
	if t.decision.match.Denied != wire.Root {
		return h.respondUnknown(dst, t)
	}
	response, rcode := h.compose(dst, t, nil)
	return response, outcome{rcode, sourceTable}
}

// consult looks the names of a reply up in the table: the targets of its CNAME records, which may be mesh hosts, and a
// name that does not exist for the nameserver, which may be an ancestor of mesh names (RFC 8020).
func (h *handler) consult(t *task, r *received) {
	q, current := &t.query, h.table.Load()
	if current == nil {
		return
	}
	for i := range r.Reply.Aliases() {
		target, ok := r.Reply.Alias(i, &t.alias)
		if !ok || q.Type == dns.TypeCNAME || q.Type == dns.TypeANY {
			continue
		}
		via, found := current.Named(target, &h.suffixes, &t.scratch)
		if found && h.answersFor(current, &via, wire.Question{Name: target, Type: q.Type, Class: q.Class}) {
			t.via = decision{match: via, table: current}
			r.aliases, r.via = i+1, &t.via
			return
		}
	}
	if found := r.Result; found.Denied() && !h.suffixes.Bypasses(q.Name) {
		r.exists = r.exists || current.HasBelow(q.Name)
	}
}

// respondUnknown appends the response for a local-only name that is not in the table.
func (h *handler) respondUnknown(dst []byte, t *task) ([]byte, outcome) {
	n := negative{dns.RcodeNameError, t.decision.zone}
	if t.decision.exists(t.query.Name) {
		n.rcode = dns.RcodeSuccess
	}
	return h.respondNegative(dst, &t.query, n, h.limit(t.query.UDPSize, t.from.protocol)), outcome{n.rcode, sourceSelf}
}

// respondTooMany appends the response to a query that is not forwarded because too many queries are in flight, and
// counts the query. err is the reason.
func (h *handler) respondTooMany(dst []byte, t *task, err error) ([]byte, outcome) {
	h.forwarder.Overflow()
	return h.respondResult(dst, t, &forward.Result{Err: err, Source: sourceSelf})
}

// failureOf returns the failure for an error of forwarding.
func failureOf(err error) failure {
	f := failure{rcode: dns.RcodeServerFailure, code: dns.ExtendedErrorCodeNoReachableAuthority, err: err}
	var cached forward.CachedFailure
	switch {
	case errors.As(err, &cached):
		f.code = dns.ExtendedErrorCodeCachedError
	case errors.Is(err, forward.ErrEcho):
		// REFUSED, so that the forwarder that sent the probe back does not send it again.
		f.rcode, f.code = dns.RcodeRefused, dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrTooMany), errors.Is(err, errOrigin):
		f.code = dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrBadReply), errors.Is(err, upstream.ErrMalformed):
		f.code = dns.ExtendedErrorCodeInvalidData
	}
	return f
}

// withProvenance adds the provenance of a response, if the client asks for it. The response begins at start.
func (h *handler) withProvenance(response []byte, start int, t *task, result outcome) []byte {
	if !t.query.Provenance {
		return response
	}
	return h.addProvenance(response, start, t, result)
}

func (h *handler) addProvenance(response []byte, start int, t *task, result outcome) []byte {
	p := t.source
	if t.source = nil; p == nil {
		p = &Provenance{}
	}
	p.Source = result.source
	limit := h.limit(t.query.UDPSize, t.from.protocol)
	for {
		text, err := json.Marshal(p)
		if err != nil { // never, because p has only texts and numbers
			return response
		}
		option := wire.AppendProvenance(nil, text)
		if left := len(p.Attempts) - 1; left >= 0 && len(response)-start+len(option) > limit {
			p.Attempts, p.MoreAttempts = p.Attempts[:left], p.MoreAttempts+1
			continue
		}
		return append(response[:start], reply.AddOption(response[start:], option, limit)...)
	}
}
