package dnsproxy

import (
	"errors"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// waits reads the clock, unless that was done, for a query that the fast path leaves for later: only such a query
// may be slow.
func (t *task) waits() {
	if t.began == 0 {
		t.began = t.handler.seen.Now()
	}
}

// stale reports whether the forwarder has found a stale reply.
func (t *task) stale() bool { return t.found != nil && t.found.Source == sourceStale }

// SentTo implements [seen.Sent]. A TCP connection whose original destination is unknown was not captured.
func (a *arrival) SentTo() (addr netip.AddrPort, sure bool) {
	if a.original != nil {
		if server, err := a.original(); err == nil && server.IsValid() {
			return server, true
		}
	}
	return a.local(), a.over == overTCP
}

// note records a query of the usual shape that was answered, before the response is sent, if it is noteworthy or a
// reader wants it. Otherwise it does not allocate.
func (h *handler) note(t *task, result outcome, response []byte) {
	q := h.queryOf(t, result, response)
	q.Name, q.Type, q.Class = t.query.Name, t.query.Type, t.query.Class
	missing := result.rcode == dns.RcodeNameError && t.query.Name.Below(h.cluster.Domain)
	if q.Kind == seen.Ordinary && missing {
		q.Kind = seen.Odd
	}
	wanted, who := h.seen.Wants(&q)
	if q.Kind == seen.Ordinary && !wanted {
		return
	}
	d := &t.decision
	if d.action == actForward && d.match.Rule == "" { // a client that has waited keeps no more than its query
		again := h.decide(t.query.Question, h.table.Load(), new(table.Scratch))
		d = &again
	}
	q.Rows, q.Reason = reasonOf(t.found)
	if q.Rows == nil {
		q.Rows = d.rows(t.query.Question)
	}
	switch {
	case q.Reason != "":
	case q.Kind == seen.Failure && d.reason != nil:
		q.Reason = d.reason.Error()
	case missing:
		q.Reason = why(*d, "")
	}
	h.record(&q, t.from, who)
}

// noteUnusual is note for a message that is not of the usual shape.
func (h *handler) noteUnusual(req *dns.Msg, t *task, result outcome, response []byte) {
	q := h.queryOf(t, result, response)
	if len(req.Question) > 0 {
		if name, err := wire.PackName(req.Question[0].Name); err == nil {
			q.Name = wire.Fold(name)
		}
		q.Type, q.Class = req.Question[0].Qtype, req.Question[0].Qclass
	}
	wanted, who := h.seen.Wants(&q)
	if q.Kind == seen.Ordinary && !wanted {
		return
	}
	if q.Rows, q.Reason = reasonOf(t.found); q.Rows == nil {
		q.Rows = t.decision.rows(wire.Question{Name: q.Name, Type: q.Type, Class: q.Class})
	}
	if q.Reason == "" && q.Kind == seen.Failure && t.decision.reason != nil {
		q.Reason = t.decision.reason.Error()
	}
	h.record(&q, t.from, who)
}

// queryOf returns what is known of every query.
func (h *handler) queryOf(t *task, result outcome, response []byte) seen.Query {
	q := seen.Query{
		Took: -1, TCP: t.from.over == overTCP, Rcode: uint16(result.rcode), Source: result.source, //nolint:gosec // twelve bits
		Truncated: len(response) >= wire.HeaderLen && response[wire.FlagsOffset]&wire.TC != 0, Class: dns.ClassINET,
		Request: t.packet, Response: response,
	}
	if t.began != 0 {
		q.Took = time.Duration(h.seen.Now() - t.began)
	}
	if found := t.found; found != nil {
		q.Server = found.Server
		switch found.Source {
		case forward.SourceStale:
			q.Age, q.Expired = time.Duration(found.Age.Seconds)*time.Second, found.Expired()
		case forward.SourceCache, forward.SourceCachedFailure:
			q.Age = time.Duration(found.Age.Seconds) * time.Second
		}
	}
	switch {
	case result.rcode != dns.RcodeSuccess && result.rcode != dns.RcodeNameError, t.stale():
		q.Kind = seen.Failure
	case q.Took >= seen.Slow:
		q.Kind = seen.Odd
	}
	return q
}

// record completes a query and records it.
func (h *handler) record(q *seen.Query, from *arrival, who bool) {
	q.Client, q.Local = from.client(), from.local
	if q.Kind != seen.Ordinary || who {
		q.Who = h.seen.Find(q, from)
	}
	q.Time = time.Now()
	h.seen.Record(q)
}

// reasonOf returns the rows of docs/behaviour.md about what the forwarder has found, and why there is no answer, or
// a stale one. It returns none for an answer.
func reasonOf(found *forward.Result) (rows []string, reason string) {
	if found == nil {
		return nil, ""
	}
	reason = found.Failure()
	switch {
	case found.Source == forward.SourceStale:
		return []string{"F9"}, reason
	case found.Source == forward.SourceCachedFailure:
		return []string{"F8"}, reason
	case reason == "":
		return nil, ""
	case found.Err == nil:
		return []string{"F3"}, reason
	}
	for _, known := range []struct {
		err error
		row string
	}{
		{forward.ErrTooMany, "F10"},
		{upstream.ErrSilent, "F10"},
		{upstream.ErrNoServers, "F7"},
		{upstream.ErrLoop, "F6"},
		{forward.ErrEcho, "F6"},
		{errOrigin, "F14"},
		{forward.ErrBadReply, "F3"},
		{upstream.ErrMalformed, "F3"},
	} {
		if errors.Is(found.Err, known.err) {
			return []string{known.row}, reason
		}
	}
	return []string{"F4"}, reason
}
