package reply

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Cut shortens a relayed message of any opcode to limit bytes: it keeps as many whole records as fit, and OPT (RFC
// 6891, section 7), and sets TC. If the message has the opcode QUERY, is neither a referral nor signed, and only
// additional records do not fit, Cut leaves out all additional records except OPT, and TC stays as it is. If a message
// cannot be walked, Cut keeps the header and the questions, or only the header. A message that fits is unchanged.
//
// The result is in msg's memory, which Cut changes.
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
	end    int                   // of what is kept, except for opt
	counts [wire.Sections]uint16 // of what is kept
	opt    []byte                // the OPT record, while it is behind end

	questionEnd int
	optInside   bool // OPT is before end
	ns, soa     bool // types in the authority section
	optional    bool // nothing is left out that clients should ask for again
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

// findOPT finds the OPT record, if it fits. It reports whether the message can be
// walked.
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

// records keeps the records that fit beside OPT, which follows them. The message has been
// walked before.
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

// leaveOut removes the additional records except OPT, if clients can do without them; the first record that does not
// fit is in section.
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
				return // it is not kept
			}
			kept = 1
		}
	}
	c.end, c.counts[wire.AdditionalSection], c.optional = before, kept, true
}
