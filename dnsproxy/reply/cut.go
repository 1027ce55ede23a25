package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// Cut makes a message of any opcode that is relayed as it came fit limit bytes: it
// keeps as many whole records as fit, and OPT (RFC 6891, section 7), with TC=1. Of
// a message that cannot be walked it keeps the header and the questions, or the
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
	wire[flagsOffset] |= bitTC
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
		for range c.claimed(section) {
			_, end, _, err := walkRecord(c.wire, c.end)
			if err != nil {
				return
			}
			isOPT := len(c.opt) > 0 && &c.wire[c.end] == &c.opt[0]
			if isOPT {
				c.opt = nil // it is counted, and stays where it is
			}
			if end+len(c.opt) > c.limit {
				return
			}
			if c.end = end; !isOPT {
				c.counts[section]++
			}
		}
	}
}
