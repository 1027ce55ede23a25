package dnsproxy

import (
	"errors"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// observe is called when the response to a query is made, before it is sent. It adds to the metrics. It also records
// the query if a reader wants the query, or if its kind is not Ordinary. For other queries it does not allocate.
func (h *handler) observe(t *task, result outcome, response []byte) {
	took := h.took(t)
	h.measure(t, took, result.source, response)
	kind := kindOf(t, result, took, response)
	missing := (result.rcode == dns.RcodeNameError || t.decision.vacant()) && isService(t.query.Name, h.cluster.Domain)
	if kind != seen.Failure && missing {
		kind = seen.Odd
	}
	if kind == seen.Ordinary && !h.seen.Watched() {
		return
	}
	q := queryOf(t, result, response)
	q.Kind, q.Took = kind, took
	wanted, wantOwner := h.seen.Wants(&q)
	if kind == seen.Ordinary && !wanted {
		return
	}
	if q.Rows, q.Reason = reasonOf(t.found, took >= seen.Slow); q.Rows == nil {
		h.explain(&q, t, missing)
	}
	if kind != seen.Ordinary || wantOwner {
		q.Who = h.seen.Find(&q, t.from)
	}
	q.Time = time.Now()
	h.seen.Record(&q)
}

// observeRefused is called for a query that is refused because too many queries wait. It records queries of the usual
// shape. response is nil if the query gets no response.
func (h *handler) observeRefused(t *task, rcode int, response []byte) {
	if t.usual {
		t.found = &forward.Result{Err: forward.ErrTooMany, Source: sourceSelf}
		h.observe(t, outcome{rcode, sourceSelf}, response)
	}
}

// truncated reports whether there is a response and it has the TC bit.
func truncated(response []byte) bool {
	return len(response) >= wire.HeaderLen && response[wire.FlagsOffset]&wire.TC != 0
}

// isService reports whether a name has the form of a Service's name: name.namespace.svc.DOMAIN, perhaps after labels
// such as _http._tcp. NXDOMAIN for such a name, or NODATA of a vacant host, is noteworthy. Others below the cluster
// domain mostly come from the search list: with ndots:5, a pod asks for three before each name outside of the mesh.
// Some of these have the form, too: for example.org, the pod asks for example.org.svc.cluster.local.
func isService(name, domain wire.Name) bool {
	rest, below := name.Owner().CutSuffix(domain)
	if !below {
		return false
	}
	for range 2 {
		if rest == wire.Root {
			return false
		}
		rest = rest.Parent()
	}
	return rest == "\x03svc"
}

// measure counts a truncated response. If the task is measured, it also adds the time that the query took to the
// metrics. It does not add the time of a probe, which is no request of a client.
func (h *handler) measure(t *task, took time.Duration, source string, response []byte) {
	if truncated(response) {
		h.metrics.truncated.Inc()
	}
	if t.measured && source != sourceProbe {
		h.metrics.observe(source, took)
	}
}

// kindOf returns the kind of a query without regard to its name.
func kindOf(t *task, result outcome, took time.Duration, response []byte) seen.Kind {
	switch {
	case result.rcode != dns.RcodeSuccess && result.rcode != dns.RcodeNameError, t.stale():
		return seen.Failure
	case took >= seen.Slow, truncated(response) && t.from.protocol == overTCP:
		return seen.Odd
	}
	return seen.Ordinary
}

// queryOf returns the record of a query without its kind, its time and the owner of its client's socket.
func queryOf(t *task, result outcome, response []byte) seen.Query {
	client := t.from.client()
	q := seen.Query{
		Client: netip.AddrPortFrom(client.Addr().Unmap(), client.Port()), Local: t.from.local, Name: t.query.Name, Type: t.query.Type, Class: t.query.Class,
		TCP: t.from.protocol == overTCP, Rcode: uint16(result.rcode), Source: result.source, //nolint:gosec // twelve bits
		Denied: t.decision.policy != nil && (t.decision.verdict == guard.Denied ||
			t.decision.verdict == guard.NoData && t.query.Type != dns.TypeHTTPS), // browsers ask for it every time
		Truncated: truncated(response), Opcode: t.packet[wire.FlagsOffset] & wire.OpcodeMask >> 3, Request: t.packet, Response: response,
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
	return q
}

// reasonOf returns the rows of docs/behaviour.md that apply to a result of the forwarder, and the reason why the
// result is a failure, is stale or is late. For any other result, it returns neither.
func reasonOf(found *forward.Result, slow bool) (rows []string, reason string) {
	if found == nil {
		return nil, ""
	}
	reason = found.Failure()
	if found.Err == nil && (reason != "" || slow) {
		switch others := upstream.Others(found.Attempts()); {
		case others != "" && reason != "":
			reason += "; " + others
		case others != "":
			return []string{"F4"}, others
		}
	}
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

// explain sets the rows and the reason of a query from its decision. missing is as in [handler.observe].
func (h *handler) explain(q *seen.Query, t *task, missing bool) {
	d := &t.decision
	if d.action == actForward && d.match.Rule == "" { // a udpClient does not keep the match: decide again
		again := h.decide(t.query.Question, h.table.Load(), new(table.Scratch))
		d = &again
	}
	q.Rows = d.rows(t.query.Question)
	switch {
	case q.Truncated && q.TCP && t.found != nil:
		q.Rows, q.Reason = []string{"F2"}, "truncated also over TCP: no nameserver has sent the whole reply"
	case d.action == actGuarded, q.Denied:
		q.Reason = t.decision.policy.Reason(t.decision.verdict, t.decision.rule)
	case q.Kind == seen.Failure && d.reason != nil:
		q.Reason = d.reason.Error()
	case missing:
		q.Reason = explainDecision(*d, t.query.Name, "")
	}
}

// took returns how long a query has taken so far. The result is negative if the clock was not read.
func (h *handler) took(t *task) time.Duration {
	if t.began == 0 {
		return -1
	}
	return time.Duration(h.seen.Now() - t.began)
}
