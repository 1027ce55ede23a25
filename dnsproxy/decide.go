package dnsproxy

import (
	"errors"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// An action is the way in which a query is handled.
type action uint8

// The actions of decide.
const (
	actReject    action = iota // a response with an error code
	actChaos                   // class CH
	actSpecial                 // a special-use name
	actHold                    // no table yet: wait, then decide again
	actPointers                // PTR records from the table
	actAddresses               // addresses or ports from the table, or NODATA
	actForward                 // forward to a nameserver
	actTarget                  // forward to a nameserver, with the target of a mesh name as the name
	actUnless                  // forward as for actTarget; the table answers if nameservers deny the name or fail
	actUnknown                 // known not to be anywhere: NXDOMAIN, or NODATA for an ancestor of mesh names
	actGuarded                 // the guard answers: the VIPs of an allowed name, or that there is no such name or record
)

// A decision says what is done with a query, and why. It is valid only as long as the question is, because it refers to
// names in the question.
type decision struct {
	action action
	match  table.Match
	rcode  int   // for actReject: the response code
	reason error // why the query is rejected, special, or forwarded although the table may have the name; may be nil
	// zone is the owner of the SOA record in negative answers. It is the local-only suffix or the special-use zone
	// of the name. If the name has a search domain after the local-only suffix, zone includes this domain. If the name
	// has neither of these, zone is the root, and the owner of the record is the name itself. For other names of
	// actUnknown, zone is match.Denied.
	zone wire.Name
	// local is the name without its search domain, for actUnknown.
	local wire.Name
	// target is the name that nameservers are asked for, for actTarget and actUnless. It differs from the question's
	// name if the question's name has a search domain, or belongs to an alias.
	target wire.Name
	// after is the target of the actTarget that follows an actUnless, because the table has no records of the type. It is
	// the root if there is none.
	after wire.Name
	// table is the table that the decision is based on; nil for pointers and for actForward.
	table *table.Table
	// policy has judged the question by rule, for actGuarded.
	policy  *guard.Policy
	verdict guard.Verdict
	rule    *guard.Rule
}

// The reasons of decisions, as Extended DNS Errors and `nametap query` show them.
var (
	errNotSynced    = errors.New("no table of mesh hosts has been received yet")
	errBypass       = errors.New("names below this suffix bypass the table")
	errOtherClass   = errors.New("nametap serves class IN")
	errNotOne       = errors.New("want exactly one question")
	errDenied       = errors.New("the control plane has sent all names here")
	errQuestionName = errors.New("the name in the question is not a valid domain name")
	errGuarded      = errors.New("guard: zone transfers, signed queries and opcodes other than QUERY do not leave this host")
)

// The sources of an answer, as metrics name them.
const (
	sourceTable    = "table"
	sourceCache    = forward.SourceCache
	sourceStale    = forward.SourceStale
	sourceUpstream = forward.SourceUpstream
	sourceSelf     = forward.SourceSelf
	sourceProbe    = "probe" // nametap itself, for questions of class CH; the agent's own probes are such questions
)

// rules decide what is done with a question. They are immutable, except for the search list,
// which follows resolv.conf.
type rules struct {
	resolvConf *forward.Forwarder // has the search list
	cluster    table.Cluster
	beforeSync BeforeSync
	suffixes   table.Suffixes
	guard      *guard.Guard
	// meantSpecial lists the suffixes that are in a special-use zone, but are mentioned in a setting. The rule for
	// special-use names does not apply to names below them.
	meantSpecial []wire.Name
}

// signed reports whether a query is signed as a whole (TSIG, SIG(0)).
func signed(q *wire.Query) bool { return q.Sent != nil && reply.Signed(q.Sent) }

// answersFor reports whether the table answers a question for a mesh name. If it does not, the question is forwarded,
// because nameservers may have records of other types for a host that is not a Service, and all records of the host
// outside of the mesh that an alias without addresses leads to. Local-only names are not forwarded.
func (r *rules) answersFor(t *table.Table, m *table.Match, q wire.Question) bool {
	if q.Type == dns.TypeCNAME && m.Owner(q.Name) != q.Name {
		return true // the answer to A has a CNAME record
	}
	outside := m.Host.Alias() != wire.Root && len(m.Host.V4)+len(m.Host.V6) == 0 // unless aliased is a Service
	if !outside && answersAlways(q.Type) {
		return true
	}
	if _, local := r.suffixes.Local(m.Owner(q.Name)); local {
		return true
	}
	aliased := t.Aliased(m, q.Name)
	return aliased.Host.Kubernetes() && aliased.Host.Alias() == wire.Root
}

// answersAlways reports whether the table answers queries of a type for every mesh name.
func answersAlways(qtype uint16) bool {
	switch qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeANY, dns.TypeHTTPS, dns.TypeSVCB:
		return true
	}
	return false
}

// screen applies the rules that do not depend on the question: opcode, number of
// questions, EDNS. It reports false if none of these rules applies.
func screen(req *dns.Msg) (d decision, decided bool) {
	if req.Opcode != dns.OpcodeQuery {
		return decision{action: actForward}, true
	}
	if len(req.Question) != 1 {
		return decision{action: actReject, rcode: dns.RcodeFormatError, reason: errNotOne}, true
	}
	opts := 0
	for _, rr := range req.Extra {
		if rr.Header().Rrtype == dns.TypeOPT {
			opts++
		}
	}
	switch { // RFC 6891, section 6.1
	case opts > 1:
		return decision{action: actReject, rcode: dns.RcodeFormatError}, true
	case opts == 1 && req.IsEdns0().Version() != 0:
		return decision{action: actReject, rcode: dns.RcodeBadVers}, true
	}
	return decision{}, false
}

func (d *decision) source() string {
	switch d.action {
	case actPointers, actAddresses:
		return sourceTable
	case actForward, actTarget, actUnless:
		return sourceUpstream
	default:
		return sourceSelf
	}
}

// failure returns the content of the response to a query that is neither answered nor forwarded.
func (d *decision) failure() failure {
	f := failure{rcode: d.rcode, code: dns.ExtendedErrorCodeOther, err: d.reason}
	switch {
	case d.rcode == dns.RcodeServerFailure:
		f.code = dns.ExtendedErrorCodeNotReady
	case errors.Is(d.reason, errGuarded):
		f.code = dns.ExtendedErrorCodeBlocked
	}
	return f
}

// forwards reports whether nameservers may be queried.
func (d *decision) forwards() bool {
	return d.action == actForward || d.action == actTarget || d.action == actUnless
}

// otherwise reports whether there is an answer without nameservers, for an actUnless, if they fail.
func (d *decision) otherwise() bool {
	return d.action == actUnless && d.after == wire.Root && !d.match.Doubtful()
}

// instead reports whether this answer takes the place of what nameservers say.
func (d *decision) instead(found *forward.Result) bool {
	return found.Denied() || d.otherwise() && !found.Exists()
}

// proceed turns an actUnless into the actTarget that follows it, if there is one and found says that the name does
// not exist. It reports whether it has done so.
func (d *decision) proceed(found *forward.Result) bool {
	if d.after == wire.Root || !found.Denied() {
		return false
	}
	d.action, d.target, d.after = actTarget, d.after, wire.Root
	return true
}

// exists reports whether the answer for an unknown name is NODATA, and not NXDOMAIN. This is so if the name is the zone
// itself or an ancestor of mesh names.
func (d *decision) exists(name wire.Name) bool {
	return name == d.zone || d.table.HasBelow(d.local)
}

// askedName returns the name that nameservers are asked for. If the query is signed, this is the query's own name.
func (d *decision) askedName(q *wire.Query) wire.Name {
	if d.action != actForward && !signed(q) {
		return d.target
	}
	return q.Name
}

// unlessTransfer returns d, or a refusal if the question asks for a zone transfer. nametap cannot transfer zones,
// because it does not know where they begin and end.
func (d decision) unlessTransfer(q wire.Question) decision {
	if isTransfer(q.Type) {
		return decision{action: actReject, match: d.match, rcode: dns.RcodeRefused, reason: errTransfer}
	}
	return d
}

// decide decides on a question by the numbered rules of the package comment; [screen] applies the rules for the rest
// of the message. current is the table; it is nil before the first push. The decision may refer to memory in s, so s
// must not be used for another lookup as long as the decision is needed.
func (r *rules) decide(q wire.Question, current *table.Table, s *table.Scratch) decision {
	d := r.decideUnguarded(q, current, s)
	if d.leaves() {
		r.judge(&d, q)
	}
	return d
}

// decideUnguarded is decide without the last of the rules, that of the guard.
func (r *rules) decideUnguarded(q wire.Question, current *table.Table, s *table.Scratch) decision {
	switch q.Class {
	case dns.ClassINET:
	case dns.ClassCHAOS:
		return decision{action: actChaos}
	default:
		return decision{action: actReject, rcode: dns.RcodeRefused, reason: errOtherClass}
	}
	if zone, special := r.special(q.Name); special {
		d := decision{action: actSpecial, match: table.Match{Rule: table.RuleNone}, zone: zone, reason: wire.ErrSpecial}
		return d.unlessTransfer(q)
	}
	local, zone, localOnly := r.suffixes.LocalSearched(q.Name, r.resolvConf.Search())
	if !localOnly && r.suffixes.Bypasses(q.Name) {
		return decision{action: actForward, match: table.Match{Rule: table.RuleNone}, reason: errBypass}
	}
	if current == nil {
		return r.decideBeforeSync(q.Name, localOnly)
	}
	m := current.Pointer(q.Name, &r.suffixes, s)
	if m.Rule == table.RulePTR {
		d := decision{action: actPointers, match: m, zone: zone}
		if m.Outside != wire.Root && !localOnly {
			d.action, d.target = actUnless, m.Outside
		}
		return d.unlessTransfer(q)
	}
	bypassed := m.Bypassed
	m = current.Lookup(q.Name, r.resolvConf.Search(), &r.suffixes, s)
	d := decision{action: actUnknown, match: m, zone: zone, local: local, table: current}
	switch none := m.Rule == table.RuleNone; {
	case none && localOnly:
	case none && (bypassed || m.Bypassed):
		return decision{action: actForward, match: m, reason: errBypass}
	case m.Denied != wire.Root:
		d.zone, d.local, d.reason = m.Denied, q.Name, errDenied
		if m.Outside != wire.Root {
			d.action, d.target = actUnless, m.Outside
		}
	case none:
		return decision{action: actForward, match: m}
	default:
		r.decideMesh(&d, q, localOnly)
	}
	return d.unlessTransfer(q)
}

// decideMesh decides on a question for the mesh name that d.match has found. localOnly is true if the name must not be
// forwarded.
func (r *rules) decideMesh(d *decision, q wire.Question, localOnly bool) {
	owner, outside := d.match.Owner(q.Name), d.match.Outside
	answers := r.answersFor(d.table, &d.match, q)
	d.action = actAddresses
	d.zone, _ = r.suffixes.Local(owner)
	if !answers {
		d.action, d.target = actTarget, owner
	}
	if outside == wire.Root || localOnly || !answers && outside != q.Name {
		return
	}
	if _, local := r.suffixes.Local(outside); !local {
		d.after = d.target
		d.action, d.target = actUnless, outside
	}
}

// special returns the special-use zone of a name. It reports false if there is none, or if a setting gives the name
// another meaning.
func (r *rules) special(name wire.Name) (zone wire.Name, found bool) {
	if zone, found = name.SpecialZone(); found {
		_, meant := name.BelowAny(r.meantSpecial)
		return zone, !meant
	}
	return zone, false
}

// decideBeforeSync decides on a question before the first table.
func (r *rules) decideBeforeSync(name wire.Name, localOnly bool) decision {
	switch {
	case r.beforeSync == BeforeSyncServfail:
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
	case r.beforeSync == BeforeSyncHold || localOnly || name.Below(r.cluster.Domain):
		return decision{action: actHold}
	}
	return decision{action: actForward, match: table.Match{Rule: table.RuleNone}, reason: errNotSynced}
}

// holdTimeout is how long a query waits for the first table (BeforeSync). None waits later than holdUntil after the start: a
// guard needs no control plane, and then clients would wait for each name of their search lists.
const holdTimeout, holdUntil = 2 * time.Second, 10 * time.Second

// A failure is the content of a response that says why there is no answer.
type failure struct {
	rcode int
	code  uint16 // the code of the Extended DNS Error (RFC 8914)
	err   error  // the text of the Extended DNS Error; nil for none
}

// maxReason bounds the text of an Extended DNS Error, in bytes. Even with a text of this length, a response with the
// longest question fits in 512 bytes.
const maxReason = 200

// text returns the text of the Extended DNS Error.
func (f failure) text() string {
	text := f.err.Error()
	return text[:min(len(text), maxReason)]
}

var errTransfer = errors.New("nametap does not give zone transfers of names that it answers itself")

// isTransfer reports whether qtype means a zone transfer.
func isTransfer(qtype uint16) bool { return qtype == dns.TypeAXFR || qtype == dns.TypeIXFR }
