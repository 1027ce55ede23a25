package dnsproxy

import (
	"fmt"
	"net/netip"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// guardZone is the owner of the SOA record in the guard's negative answers.
	guardZone wire.Name = "\x05guard\x07nametap"
	// guardTTL is the TTL of the guard's answers, in seconds.
	guardTTL = 30
)

// newGuardSOA returns the SOA record of the guard's negative answers, in wire form.
func newGuardSOA() []byte {
	record := append([]byte(guardZone), 0, 0, byte(dns.TypeSOA), 0, byte(dns.ClassINET), 0, 0, 0, guardTTL, 0)
	data := newSOAData(guardZone, guardTTL)
	return append(append(record, byte(len(data))), data...) //nolint:gosec // fewer than 100
}

// judge applies the guard's policy to a question that nameservers would be asked, unless the policy only audits. If
// nameservers would be asked first, and then the table, a name that they must not be asked for is one that they do not
// have. A name below a wildcard that may have been made by the search list is asked for: if it exists, [handler.judgeResult]
// gives its VIPs.
func (r *rules) judge(d *decision, q wire.Question) {
	policy := r.guard.Policy()
	if !policy.Enforces() {
		return
	}
	name := d.outside(q.Name)
	verdict, rule := policy.Judge(name, q.Type)
	ofVIP := wire.Root
	if addr, isAddr := wire.ReverseAddr(name); isAddr {
		if ofVIP = r.guard.Name(addr); ofVIP != wire.Root {
			verdict, rule = policy.Judge(ofVIP, dns.TypeA)
		}
	}
	switch {
	case isTransfer(q.Type):
		*d = decision{action: actReject, match: d.match, rcode: dns.RcodeRefused, reason: errGuarded}
	case verdict == guard.Forwarded, d.action == actUnless && verdict == guard.Carried:
	case d.action == actUnless:
		d.insteadOfNameservers()
	case verdict == guard.Carried && !policy.Names(name) && r.searched(name):
	default:
		*d = decision{
			action: actGuarded, match: table.Match{Rule: table.RuleNone}, policy: policy, verdict: verdict, rule: rule, target: ofVIP,
		}
	}
}

// leaves reports whether nameservers are asked for a name that the table may not have.
func (d *decision) leaves() bool { return d.action == actForward || d.action == actUnless }

// outside returns the name that nameservers are asked for by an actForward or an actUnless.
func (d *decision) outside(name wire.Name) wire.Name {
	if d.action == actUnless {
		return d.target
	}
	return name
}

// insteadOfNameservers turns an actUnless into what follows if nameservers do not have the name.
func (d *decision) insteadOfNameservers() {
	switch {
	case d.after != wire.Root:
		d.action, d.target, d.after = actTarget, d.after, wire.Root
	case d.match.Denied != wire.Root:
		d.action = actUnknown
	case d.match.Rule == table.RulePTR:
		d.action = actPointers
	default:
		d.action = actAddresses
	}
}

// searched reports whether a name is below a domain of the search list.
func (r *rules) searched(name wire.Name) bool {
	_, found := name.BelowAny(r.resolvConf.Search())
	return found
}

// judgeResult records what nameservers say of a question that the guard has let pass, or only audits. It reports whether
// the guard answers instead: nameservers have the name, and the policy has VIPs for it.
func (h *handler) judgeResult(t *task, found *forward.Result) (guarded bool) {
	policy, d := h.guard.Policy(), &t.decision
	if policy == nil || !d.leaves() {
		return false
	}
	name := d.outside(t.query.Name)
	verdict, rule := policy.Judge(name, t.query.Type)
	d.policy, d.verdict, d.rule = policy, verdict, rule // for [handler.observe]
	if policy.Enforces() && verdict == guard.Carried && name == t.query.Name && found.Exists() {
		*d = decision{action: actGuarded, match: table.Match{Rule: table.RuleNone}, policy: policy, verdict: verdict, rule: rule}
		return true
	}
	answers, qtype := -1, t.query.Type
	if found.Exists() {
		answers = found.Reply.Answers()
		for data := range found.Reply.Data(qtype) {
			addr, _ := netip.AddrFromSlice(data)
			if (addr.Is4() && qtype == dns.TypeA || addr.Is6() && qtype == dns.TypeAAAA) && !policy.Enforces() {
				h.guard.Answered(name, addr)
			}
		}
	}
	h.asked(t, name, answers)
	return false
}

// asked records a question for a name that t.decision has judged. answers is as in [guard.Guard.Asked].
func (h *handler) asked(t *task, name wire.Name, answers int) {
	if h.guard.Asked(name, t.query.Type, t.decision.rule, answers) {
		q := queryOf(t, outcome{}, nil)
		client := q.Client.Addr().String()
		if owner := h.seen.Find(&q, t.from); owner.Known {
			client = fmt.Sprintf("uid %d", owner.UID)
		}
		h.guard.AskedBy(name, client)
	}
}

// respondGuarded appends to dst the response to a question that the guard answers.
func (h *handler) respondGuarded(dst []byte, t *task) ([]byte, outcome) {
	q, d := &t.query, &t.decision
	w := writer{answerer: &h.guarded, query: q, buf: dst, start: len(dst), limit: h.limit(q.UDPSize, t.from.protocol)}
	w.begin()
	result := outcome{dns.RcodeSuccess, sourceSelf}
	var memory [wire.ExtendedErrorLen + maxReason]byte
	option := memory[:0]
	if d.verdict == guard.Carried {
		w.vip(h.guard, d.target)
	} else if q.EDNS {
		var text [maxReason]byte
		reason := d.policy.AppendReason(text[:0], d.verdict, d.rule)
		room := w.limit - len(w.buf) + w.start - len(h.guardSOA) - wire.ExtendedErrorLen
		option = wire.AppendExtendedError(option, dns.ExtendedErrorCodeBlocked, reason[:max(min(len(reason), maxReason, room), 0)])
	}
	if w.answers == 0 && w.fits(len(h.guardSOA)) {
		w.buf = append(w.buf, h.guardSOA...)
		w.authority++
	}
	if d.verdict == guard.Denied {
		result.rcode = dns.RcodeNameError
	}
	if d.target == wire.Root {
		h.asked(t, q.Name, -1)
	}
	w.end(wire.AA, result.rcode, option)
	return w.buf, result
}

// vip writes the VIP of the question's name or, if target is not the root, the name of the VIP of which it is the PTR name.
func (w *writer) vip(g *guard.Guard, target wire.Name) {
	qtype := w.query.Type
	if target != wire.Root {
		if qtype == dns.TypePTR && w.record(questionName, qtype, len(target)+1) {
			w.buf = append(append(w.buf, target...), 0)
			w.answers++
		}
		return
	}
	pair := g.VIPs(w.query.Name)
	four, six := pair.V4.As4(), pair.V6.As16()
	if qtype == dns.TypeA {
		w.address(questionName, qtype, four[:])
	} else {
		w.address(questionName, qtype, six[:])
	}
	w.answers++
}
