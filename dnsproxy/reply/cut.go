package reply

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Cut shortens a relayed message of any opcode to limit bytes. It keeps the OPT record (RFC 6891, section 7) and as
// many whole records as fit, and sets TC. If the message is malformed, Cut keeps the header and the questions, or
// only the header. It does not change a message that fits.
//
// If only additional records do not fit, clients can usually do without them. Then Cut leaves out all additional
// records except the OPT record, and does not set TC. It does so only if the message has the opcode QUERY, and is
// neither signed nor a referral.
//
// The result is in the memory of msg, which Cut changes.
func Cut(msg []byte, limit int) []byte {
	if len(msg) <= limit {
		return msg
	}
	if limit < wire.HeaderLen {
		return msg[:max(limit, 0)]
	}
	c := cutter{msg: msg, limit: limit, end: wire.HeaderLen}
	c.walk()
	if !c.optional {
		msg[wire.FlagsOffset] |= wire.TC
	}
	wire.PutCounts(msg, &c.counts)
	return append(msg[:c.end], c.opt...)
}

// A cutter finds which parts of a message fit.
type cutter struct {
	msg    []byte
	limit  int
	end    int                   // msg[:end] is kept
	counts [wire.Sections]uint16 // how many records of each section are kept, including opt
	opt    []byte                // the OPT record, if it is kept and not before end

	questionEnd int
	optInside   bool // the OPT record is before end
	ns, soa     bool // whether the authority section has records of these types
	optional    bool // clients can do without the records that are left out
}

// walk finds what is kept, and sets end, counts and opt.
func (c *cutter) walk() {
	for range wire.Count(c.msg, wire.QuestionSection) {
		end, err := wire.WalkQuestion(c.msg, c.end)
		if err != nil || end > c.limit {
			c.end, c.counts[wire.QuestionSection] = wire.HeaderLen, 0
			return
		}
		c.end = end
		c.counts[wire.QuestionSection]++
	}
	if c.findOPT() {
		c.records()
	}
}

// findOPT finds the OPT record, if it fits. It reports whether the message is well-formed.
func (c *cutter) findOPT() bool {
	w := wire.Walk(c.msg, c.end)
	for w.Next() {
		isOPT := w.Section == wire.AdditionalSection && w.Type() == dns.TypeOPT
		if isOPT && c.opt == nil && c.end+w.End-w.Owner <= c.limit {
			c.opt = c.msg[w.Owner:w.End]
			c.counts[wire.AdditionalSection] = 1
		}
	}
	if w.Err != nil {
		c.opt, c.counts[wire.AdditionalSection] = nil, 0
		return false
	}
	return true
}

// records finds the records that fit, together with the OPT record. findOPT must have reported true.
func (c *cutter) records() {
	c.questionEnd = c.end
	for w := wire.Walk(c.msg, c.questionEnd); w.Next(); {
		if w.Section == wire.AuthoritySection {
			c.ns, c.soa = c.ns || w.Type() == dns.TypeNS, c.soa || w.Type() == dns.TypeSOA
		}
		isOPT := len(c.opt) > 0 && &c.msg[w.Owner] == &c.opt[0]
		if isOPT {
			c.opt = nil // it is counted, and stays where it is
			c.optInside = true
		}
		if w.End+len(c.opt) > c.limit {
			c.leaveOut(w.Section)
			return
		}
		if c.end = w.End; !isOPT {
			c.counts[w.Section]++
		}
	}
}

// leaveOut removes the additional records except the OPT record, if clients can do without them. section is the
// section of the first record that does not fit.
func (c *cutter) leaveOut(section int) {
	rcode := int(c.msg[wire.FlagsOffset+1] & wire.RcodeMask)
	if section != wire.AdditionalSection || c.optInside || c.msg[wire.FlagsOffset]&wire.OpcodeMask != 0 ||
		isReferral(rcode, wire.Count(c.msg, wire.AnswerSection), c.ns, c.soa) {
		return
	}
	before, kept := c.questionEnd, uint16(0)
	for w := wire.Walk(c.msg, c.questionEnd); w.Next(); {
		if w.Section != wire.AdditionalSection {
			before = w.End
			continue
		}
		switch w.Type() {
		case dns.TypeTSIG, dns.TypeSIG:
			return // it signs the whole message
		case dns.TypeOPT:
			if len(c.opt) == 0 || &c.msg[w.Owner] != &c.opt[0] {
				return // this OPT record is not kept
			}
			kept = 1
		}
	}
	c.end, c.counts[wire.AdditionalSection], c.optional = before, kept, true
}
