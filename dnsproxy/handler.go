package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	table      atomic.Pointer[Table]
	synced     chan struct{} // closed when the first table is in use
}

// An action is what is done with a query.
type action string

// The actions of decide.
const (
	actReject    action = "reject"    // an answer without a look at the table
	actChaos     action = "chaos"     // class CH
	actHold      action = "hold"      // no table yet: wait, then decide again
	actPointers  action = "pointers"  // PTR records from the table
	actAddresses action = "addresses" // addresses from the table, or NODATA
	actForward   action = "forward"   // to a nameserver
	actExists    action = "exists"    // to a nameserver, NXDOMAIN becomes NODATA
)

// A decision is what becomes of a query, and why.
type decision struct {
	action action
	rows   []string // of the behaviour reference, the name's row first
	match  match
	rcode  int    // of actReject
	text   string // why, for actReject and special names
}

// The sources of an answer, as metrics name them.
const (
	sourceTable    = "table"
	sourceUpstream = "upstream"
	sourceSelf     = "self"
)

func (d decision) source() string {
	switch d.action {
	case actPointers, actAddresses:
		return sourceTable
	case actForward, actExists:
		return sourceUpstream
	default:
		return sourceSelf
	}
}

// decide says what becomes of a query; the package comment numbers its rules.
// table is nil before the first push.
func (h *handler) decide(req *dns.Msg, table *Table) decision {
	if req.Opcode != dns.OpcodeQuery {
		return decision{action: actForward, rows: []string{"A11"}}
	}
	if len(req.Question) != 1 {
		return decision{action: actReject, rows: []string{"A10"}, rcode: dns.RcodeFormatError, text: "want one question"}
	}
	if rcode := checkEDNS(req); rcode != dns.RcodeSuccess {
		return decision{action: actReject, rows: []string{"A8"}, rcode: rcode}
	}
	q := req.Question[0]
	switch q.Qclass {
	case dns.ClassINET:
	case dns.ClassCHAOS:
		return decision{action: actChaos, rows: []string{"A10"}}
	default:
		return decision{action: actReject, rows: []string{"A10"}, rcode: dns.RcodeRefused, text: "nametap serves class IN"}
	}
	wire, err := packName(q.Name)
	if err != nil {
		return decision{action: actReject, rows: []string{"A10"}, rcode: dns.RcodeFormatError, text: "the question's name: " + err.Error()}
	}
	name := fold(wire)
	if table == nil {
		return h.decideBeforeSync(name)
	}
	if m := table.pointer(name); m.rule == RulePTR {
		return decision{action: actPointers, rows: []string{"N8"}, match: m}
	}
	if name.special() {
		return decision{action: actForward, rows: []string{"N7"}, text: errSpecial.Error()}
	}
	return decideOwn(table.lookup(name, h.resolvConf.Load().search), q.Qtype)
}

// checkEDNS returns the code of a query that RFC 6891, section 6.1, has us
// reject: BADVERS for a version that we do not know, FORMERR for two OPT records.
func checkEDNS(req *dns.Msg) int {
	opts := 0
	for _, rr := range req.Extra {
		if rr.Header().Rrtype == dns.TypeOPT {
			opts++
		}
	}
	switch {
	case opts > 1:
		return dns.RcodeFormatError
	case opts == 1 && req.IsEdns0().Version() != 0:
		return dns.RcodeBadVers
	}
	return dns.RcodeSuccess
}

// decideBeforeSync is decide without a table.
func (h *handler) decideBeforeSync(name wireName) decision {
	switch h.beforeSync {
	case BeforeSyncHold:
		return decision{action: actHold, rows: []string{"C6"}}
	case BeforeSyncServfail:
		return decision{action: actReject, rows: []string{"C6"}, rcode: dns.RcodeServerFailure, text: errNotSynced.Error()}
	}
	if name.below(h.cluster.domain) {
		return decision{action: actHold, rows: []string{"C6"}}
	}
	return decision{action: actForward, rows: []string{"C6"}}
}

// errNotSynced is what a client is told whose query found no table.
var errNotSynced = errors.New("no table of mesh hosts has been received yet")

// decideOwn is decide for a name that was looked up in the table.
func decideOwn(m match, qtype uint16) decision {
	if m.rule == RuleNone {
		return decision{action: actForward, rows: []string{"N9"}, match: m}
	}
	d := decision{action: actAddresses, rows: nameRows(m), match: m}
	row := "A1"
	switch qtype {
	case dns.TypeA:
		if len(m.host.v4) == 0 {
			row = "A2"
		}
	case dns.TypeAAAA:
		if len(m.host.v6) == 0 {
			row = "A2"
		}
	case dns.TypeANY:
		row = "A5"
	case dns.TypeHTTPS, dns.TypeSVCB:
		row = "A3"
	default:
		row = "A4"
		if !m.host.kubernetes() {
			d.action = actExists
		}
	}
	d.rows = append(d.rows, row)
	return d
}

// nameRows names the rows by which a name is the table's.
func nameRows(m match) []string {
	switch m.rule {
	case RuleExact:
		return []string{"N1"}
	case RuleWildcard:
		return []string{"N4"}
	case RuleShortName:
		return []string{"N2"}
	case RuleAutopath:
		return append([]string{"N5"}, nameRows(match{rule: m.base})...)
	case RulePTR:
		return []string{"N8"}
	default:
		return []string{"N9"}
	}
}

// ServeDNS answers one query from a listener. It implements [dns.Handler].
func (h *handler) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	h.metrics.requests.Inc()
	protocol := "tcp"
	if _, udp := w.LocalAddr().(*net.UDPAddr); udp {
		protocol = "udp"
	}
	resp, source := h.answer(context.Background(), req)
	h.fit(resp, req, protocol == "udp")
	qtype := dns.TypeNone
	if len(req.Question) > 0 {
		qtype = req.Question[0].Qtype
	}
	h.metrics.countQuery(qtype, protocol, resp.Rcode, source)
	// A client that is gone cannot be told anything, and that is no fault of ours.
	_ = w.WriteMsg(resp)
}

// answer returns the response to req and the source it came from.
func (h *handler) answer(ctx context.Context, req *dns.Msg) (resp *dns.Msg, source string) {
	d := h.decide(req, h.table.Load())
	if d.action == actHold {
		d = h.hold(ctx, req)
	}
	return h.carryOut(ctx, req, d), d.source()
}

// hold waits for the first table and decides again.
func (h *handler) hold(ctx context.Context, req *dns.Msg) decision {
	timer := time.NewTimer(holdTimeout)
	defer timer.Stop()
	select {
	case <-h.synced:
		return h.decide(req, h.table.Load())
	case <-timer.C:
	case <-ctx.Done():
	}
	return decision{action: actReject, rows: []string{"C6"}, rcode: dns.RcodeServerFailure, text: errNotSynced.Error()}
}

// carryOut makes the response that d asks for.
func (h *handler) carryOut(ctx context.Context, req *dns.Msg, d decision) *dns.Msg {
	switch d.action {
	case actChaos:
		return h.chaos(req, h.version, h.id)
	case actPointers:
		return h.pointers(req, d.match.ptr)
	case actAddresses:
		return h.addresses(req, d.match)
	case actForward:
		return h.forward(ctx, req)
	case actExists:
		resp := h.forward(ctx, req)
		if resp.Rcode == dns.RcodeNameError {
			return h.addresses(req, d.match) // of no type that has any: NODATA
		}
		return resp
	case actReject, actHold:
	}
	code := dns.ExtendedErrorCodeOther
	switch {
	case d.rcode == dns.RcodeServerFailure:
		code = dns.ExtendedErrorCodeNotReady
	case d.text == "":
		return h.reply(req, d.rcode)
	}
	return h.failure(req, d.rcode, code, d.text)
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
