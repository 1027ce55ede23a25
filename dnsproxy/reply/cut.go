package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// Cut makes a message of any opcode that is relayed as it came fit limit bytes: it
// keeps as many whole records as fit, and OPT (RFC 6891, section 7), with TC=1; without
// if all that it leaves out is additional RRsets of a reply to a query that is no
// referral and not signed. Of a message that cannot be walked it keeps the header and the questions, or the
// header. One that fits stays as it is.
//
// The result is in wire's memory, which Cut changes.
func Cut(wire []byte, limit int) []byte {
	if len(wire) <= limit {
		return wire
	}
	if limit < headerLen {
		return wire[:max(limit, 0)]
	}
	c := cutter{wire: wire, limit: limit, end: headerLen}
	c.walk()
	if !c.optional {
		wire[flagsOffset] |= bitTC
	}
	for i, n := range c.counts {
		binary.BigEndian.PutUint16(wire[countsOffset+2*i:], n)
	}
	return append(wire[:c.end], c.opt...)
}

// A cutter finds what of a message fits.
type cutter struct {
	wire   []byte
	limit  int
	end    int       // of what is kept, but for opt
	counts [4]uint16 // of what is kept: questions, and records by section
	opt    []byte    // the OPT record, as long as it stands behind end

	additional int  // where the additional section begins
	optInside  bool // OPT stays where it is
	ns, soa    bool // what types the authority section has
	optional   bool // nothing is left out that clients should ask for again
}

// walk sets what is kept.
func (c *cutter) walk() {
	for range c.claimed(0) {
		end, err := walkQuestion(c.wire, c.end)
		if err != nil || end > c.limit {
			c.end, c.counts[0] = headerLen, 0
			return
		}
		c.end = end
		c.counts[0]++
	}
	if c.findOPT() {
		c.records()
	}
}

// claimed returns the number of questions or records that the header claims.
func (c *cutter) claimed(section int) int {
	return int(binary.BigEndian.Uint16(c.wire[countsOffset+2*section:]))
}

// findOPT finds the OPT record, if it fits. It reports whether the message can be
// walked.
func (c *cutter) findOPT() bool {
	const last = 1 + additional
	off := c.end
	for section := 1; section <= last; section++ {
		for range c.claimed(section) {
			fixed, end, _, err := walkRecord(c.wire, off)
			if err != nil {
				c.opt, c.counts[last] = nil, 0
				return false
			}
			isOPT := section == last && binary.BigEndian.Uint16(c.wire[fixed:]) == dns.TypeOPT
			if isOPT && c.opt == nil && c.end+end-off <= c.limit {
				c.opt = c.wire[off:end]
				c.counts[last] = 1
			}
			off = end
		}
	}
	return true
}

// records keeps the records that fit beside OPT, which follows them.
func (c *cutter) records() {
	for section := 1; section <= sections; section++ {
		c.additional = c.end // at last
		for range c.claimed(section) {
			fixed, end, _, err := walkRecord(c.wire, c.end)
			if err != nil {
				return
			}
			c.note(section, binary.BigEndian.Uint16(c.wire[fixed:]))
			isOPT := len(c.opt) > 0 && &c.wire[c.end] == &c.opt[0]
			if isOPT {
				c.opt = nil // it is counted, and stays where it is
				c.optInside = true
			}
			if end+len(c.opt) > c.limit {
				c.leaveOut(section)
				return
			}
			if c.end = end; !isOPT {
				c.counts[section]++
			}
		}
	}
}

// note notes what of a record's type is needed later.
func (c *cutter) note(section int, rrtype uint16) {
	if section == 1+authority {
		c.ns, c.soa = c.ns || rrtype == dns.TypeNS, c.soa || rrtype == dns.TypeSOA
	}
}

// leaveOut removes those additional records whose RRset does not fit as a whole, if the
// message can do without; section is the one that does not fit.
func (c *cutter) leaveOut(section int) {
	rcode := int(c.wire[flagsOffset+1] & maskRcode)
	if section != 1+additional || c.optInside || c.wire[flagsOffset]&maskOpcode != 0 || isReferral(rcode, c.claimed(1+answer), c.ns, c.soa) {
		return
	}
	var places []place
	kept := 0
	for off := c.additional; len(places) < c.claimed(1+additional); {
		fixed, end, _, err := walkRecord(c.wire, off)
		if err != nil {
			return
		}
		switch binary.BigEndian.Uint16(c.wire[fixed:]) {
		case dns.TypeTSIG, dns.TypeSIG:
			return // what it signs is no longer whole
		case dns.TypeOPT:
			if len(c.opt) == 0 || &c.wire[off] != &c.opt[0] {
				return // it is not kept
			}
		}
		if off < c.end {
			kept++
		}
		places = append(places, place{owner: off, fixed: fixed})
		off = end
	}
	left := wholeSets(c.wire, func(i int) place { return places[i] }, kept, len(places))
	c.end = places[left].owner
	c.counts[1+additional] -= uint16(kept - left) //nolint:gosec // not below 0
	c.optional = true
}
