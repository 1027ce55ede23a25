package dnsproxy

import (
	"errors"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// An action is what is done with a query.
type action uint8

// The actions of decide.
const (
	actReject    action = iota // an answer without a look at the table
	actChaos                   // class CH
	actSpecial                 // a special-use name
	actHold                    // no table yet: wait, then decide again
	actPointers                // PTR records from the table
	actAddresses               // addresses from the table, or NODATA
	actForward                 // to a nameserver
	actExists                  // to a nameserver, NXDOMAIN becomes NODATA
	actUnknown                 // local only, and not in the table: NXDOMAIN, or NODATA for an ancestor
)

// A decision is what becomes of a query, and why. It is good for as long as the
// question.
type decision struct {
	action action
	match  table.Match
	rcode  int   // of actReject
	reason error // of actReject, and why a name that might be ours is forwarded
	// zone is what negative answers name as their zone: the suffix that keeps the name
	// which answers from nameservers, with the search domain behind it for actUnknown.
	// The root if there is none: then the name is a zone of its own.
	zone wire.Name
	// local is the name without the search domain, and table where it is not, of
	// actUnknown.
	local wire.Name
	table *table.Table
}

// The reasons of decisions, as clients and people read them.
var (
	errNotSynced    = errors.New("no table of mesh hosts has been received yet")
	errBypass       = errors.New("names of this suffix are to bypass the table")
	errOtherClass   = errors.New("nametap serves class IN")
	errNotOne       = errors.New("want one question")
	errQuestionName = errors.New("the name in the question is not a valid domain name")
)

// The sources of an answer, as metrics name them.
const (
	sourceTable    = "table"
	sourceCache    = forward.SourceCache
	sourceUpstream = forward.SourceUpstream
	sourceSelf     = forward.SourceSelf
)

func (d *decision) source() string {
	switch d.action {
	case actPointers, actAddresses:
		return sourceTable
	case actForward, actExists:
		return sourceUpstream
	default:
		return sourceSelf
	}
}

// failure is what a query is told that is neither answered nor forwarded.
func (d *decision) failure() failure {
	f := failure{rcode: d.rcode, code: dns.ExtendedErrorCodeOther, err: d.reason}
	if d.rcode == dns.RcodeServerFailure {
		f.code = dns.ExtendedErrorCodeNotReady
	}
	return f
}

// forwards reports whether nameservers may be asked, be it only for the walk of the search
// list of a local-only name.
func (d *decision) forwards() bool {
	return d.action == actForward || d.action == actExists || d.action == actUnknown
}

// fate returns what happens to a name of a walk that was decided on.
func (d *decision) fate() forward.Fate {
	switch d.action {
	case actForward:
		return forward.Forwarded
	case actUnknown:
		return forward.Absent
	default:
		return forward.AnsweredHere
	}
}

// exists reports whether a name that is never forwarded exists without records: as the
// zone that the suffix is, or as an ancestor of names of the table.
func (d *decision) exists(name wire.Name) bool {
	return d.action == actUnknown && (name == d.zone || d.table.HasBelow(d.local))
}

// decide says what becomes of a question; the package comment numbers its rules,
// of which [handler.screen] applies those for the rest of the message. current is nil
// before the first push.
func (h *handler) decide(q wire.Question, current *table.Table, s *table.Scratch) decision {
	switch q.Class {
	case dns.ClassINET:
	case dns.ClassCHAOS:
		return decision{action: actChaos}
	default:
		return decision{action: actReject, rcode: dns.RcodeRefused, reason: errOtherClass}
	}
	if zone, special := h.special(q.Name); special {
		d := decision{action: actSpecial, match: table.Match{Rule: table.RuleNone}, zone: zone, reason: wire.ErrSpecial}
		return d.unlessTransfer(q)
	}
	local, zone, localOnly := h.suffixes.LocalSearched(q.Name, h.forwarder.Search())
	if !localOnly && h.suffixes.Bypasses(q.Name) {
		return decision{action: actForward, match: table.Match{Rule: table.RuleNone}, reason: errBypass}
	}
	if current == nil {
		return h.decideBeforeSync(q.Name, localOnly)
	}
	m := current.Pointer(q.Name, &h.suffixes, s)
	if m.Rule == table.RulePTR {
		return decision{action: actPointers, match: m, zone: zone}.unlessTransfer(q)
	}
	bypassed := m.Bypassed
	m = current.Lookup(q.Name, h.search(), &h.suffixes, s)
	switch {
	case m.Rule == table.RuleNone && localOnly:
		return decision{action: actUnknown, match: m, zone: zone, local: local, table: current}.unlessTransfer(q)
	case m.Rule == table.RuleNone && (bypassed || m.Bypassed):
		return decision{action: actForward, match: m, reason: errBypass}
	case m.Rule == table.RuleNone:
		return decision{action: actForward, match: m}
	case m.Host.Kubernetes() || answersAlways(q.Type) || localOnly || isTransfer(q.Type):
		zone, _ = h.suffixes.Local(m.Owner(q.Name))
		return decision{action: actAddresses, match: m, zone: zone}.unlessTransfer(q)
	default:
		return decision{action: actExists, match: m}
	}
}

// unlessTransfer returns d, or for a zone transfer that it is refused: what is answered
// here has records and no zones.
func (d decision) unlessTransfer(q wire.Question) decision {
	if isTransfer(q.Type) {
		return decision{action: actReject, match: d.match, rcode: dns.RcodeRefused, reason: errTransfer}
	}
	return d
}

// special returns the special-use zone of a name, unless settings give it a meaning.
func (h *handler) special(name wire.Name) (zone wire.Name, found bool) {
	if zone, found = name.SpecialZone(); found {
		_, meant := name.BelowAny(h.meantSpecial)
		return zone, !meant
	}
	return zone, false
}

// search returns the search list by which names are expanded (N5).
func (h *handler) search() []wire.Name {
	if h.autopath == AutopathOff {
		return nil
	}
	return h.forwarder.Search()
}

// answersAlways reports whether the table answers a type for every own name.
// Others of hosts that are no Services may well have records elsewhere.
func answersAlways(qtype uint16) bool {
	switch qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeANY, dns.TypeHTTPS, dns.TypeSVCB:
		return true
	}
	return false
}

// decideBeforeSync is decide without a table.
func (h *handler) decideBeforeSync(name wire.Name, localOnly bool) decision {
	switch {
	case h.beforeSync == BeforeSyncServfail:
		return decision{action: actReject, rcode: dns.RcodeServerFailure, reason: errNotSynced}
	case h.beforeSync == BeforeSyncHold || localOnly || name.Below(h.cluster.Domain):
		return decision{action: actHold}
	}
	return decision{action: actForward, match: table.Match{Rule: table.RuleNone}, reason: errNotSynced}
}

// startsWalk reports whether the search list is walked for a query whose name is not in
// the table; the comment of package forward has the rules.
func (h *handler) startsWalk(q *wire.Query) bool {
	if h.autopath != AutopathAll || q.DO || q.CD || q.Type != dns.TypeA && q.Type != dns.TypeAAAA {
		return false
	}
	return h.forwarder.StartsWalk(q.Name)
}

// steps decides on each name of the walk for a query. The table is loaded after the key of
// the walk was made: see [forward.Forwarder.Key]. The question's own name was decided on
// before.
func (h *handler) steps(t *task) []forward.Step {
	names := h.forwarder.WalkNames(t.query.Name)
	steps := make([]forward.Step, len(names))
	current, scratch := h.table.Load(), new(table.Scratch)
	for i, name := range names {
		d := &t.decision
		if i > 0 {
			again := h.decide(wire.Question{Name: name, Type: t.query.Type, Class: t.query.Class}, current, scratch)
			d = &again
		}
		steps[i] = forward.Step{Name: name, Fate: d.fate()}
	}
	return steps
}

// screen applies the rules that come before the question: those for opcodes, the
// number of questions and EDNS. decided is false if the question is to be decided.
func (h *handler) screen(req *dns.Msg) (d decision, decided bool) {
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

// rows names the rows of the behaviour reference by which a question was decided:
// first those for its name, then the one for its type.
func (d *decision) rows(q wire.Question) []string {
	switch d.action {
	case actHold:
		return []string{"C6"}
	case actPointers:
		return []string{"N8"}
	case actAddresses, actExists:
		return append(nameRows(d.match), d.typeRow(q.Type))
	case actUnknown:
		return []string{"F12"}
	case actForward, actReject:
		switch {
		case errors.Is(d.reason, errBypass):
			return []string{"F12"}
		case errors.Is(d.reason, errNotSynced):
			return []string{"C6"}
		case errors.Is(d.reason, errTransfer):
			return append(nameRows(d.match), "A4")
		case d.action == actForward:
			return []string{"N9"}
		}
	case actSpecial:
		return []string{"N7"}
	case actChaos:
	}
	return []string{"A10"}
}

func (d *decision) typeRow(qtype uint16) string {
	switch {
	case qtype == dns.TypeANY:
		return "A5"
	case qtype == dns.TypeHTTPS || qtype == dns.TypeSVCB:
		return "A3"
	case !answersAlways(qtype):
		return "A4"
	case qtype == dns.TypeA && len(d.match.Host.V4) == 0, qtype == dns.TypeAAAA && len(d.match.Host.V6) == 0:
		return "A2"
	default:
		return "A1"
	}
}

// nameRows names the rows by which a name is the table's.
func nameRows(m table.Match) []string {
	switch m.Rule {
	case table.RuleExact:
		return []string{"N1"}
	case table.RuleWildcard:
		return []string{"N4"}
	case table.RuleShortName:
		return []string{"N2"}
	case table.RuleAutopath:
		return append([]string{"N5"}, nameRows(table.Match{Rule: m.Base})...)
	case table.RulePTR, table.RuleNone:
	}
	return nil
}
