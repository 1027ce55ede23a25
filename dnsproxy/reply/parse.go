package reply

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/miekg/dns"
)

var (
	errNoReply   = errors.New("the message is no reply to a query")
	errLong      = errors.New("the message is longer than 65535 bytes")
	errQuestions = errors.New("the message has not one question")
	errOPT       = errors.New("an OPT record is malformed, misplaced or not the only one")
)

// Parse walks a nameserver's reply: opcode QUERY, one question. One that says that
// it is cut may end anywhere; its whole records are kept. Bytes behind the last
// record are not. A reply without records may lack the question, too, as the
// failures of some servers do.
//
// The Reply keeps wire, which the caller must not change afterwards.
func Parse(wire []byte) (*Reply, error) {
	r, err := parse(wire)
	if err != nil {
		return nil, fmt.Errorf("parsing a reply: %w", err)
	}
	return r, nil
}

func parse(wire []byte) (*Reply, error) { return parseInto(new(Reply), wire) }

// parseInto is parse into a Reply that is empty but for memory to use again.
func parseInto(r *Reply, wire []byte) (*Reply, error) {
	switch {
	case len(wire) < headerLen:
		return nil, errShort
	case len(wire) > dns.MaxMsgSize:
		return nil, errLong
	case wire[flagsOffset]&(bitQR|maskOpcode) != bitQR:
		return nil, errNoReply
	}
	r.wire, r.questionEnd = wire, headerLen
	p := parser{Reply: r, least: math.MaxUint32, soa: -1}
	questions := binary.BigEndian.Uint16(wire[countsOffset:])
	if questions > 1 {
		return nil, errQuestions
	}
	if questions == 1 {
		var err error
		if p.questionEnd, err = walkQuestion(wire, headerLen); err != nil {
			return nil, fmt.Errorf("question: %w", err)
		}
	}
	if err := p.walk(); err != nil {
		return nil, err
	}
	switch {
	case questions == 0 && len(p.records) > 0:
		return nil, errQuestions
	case p.opt && !p.optLast:
		moved, err := optToEnd(wire)
		if err != nil {
			return nil, err
		}
		return parse(moved)
	}
	p.finish()
	return p.Reply, nil
}

// A parser is a Reply in the making.
type parser struct {
	*Reply
	off          int    // how far it is walked
	least        uint32 // the least TTL so far
	soa          int    // index of the SOA in the authority section, or -1
	opt, optLast bool   // whether there was an OPT record; as the last one
}

// walk walks all records.
func (p *parser) walk() error {
	p.off = p.questionEnd
	total := 0
	for section := range sections {
		total += p.claimed(section)
	}
	// Counts may lie; a record with the root as its owner is the shortest.
	if n := min(total, (len(p.wire)-p.off)/(1+fixedLen)); cap(p.records) < n {
		p.records = make([]record, 0, n)
	}
	for section := range sections {
		for range p.claimed(section) {
			err := p.record(section)
			if errors.Is(err, errShort) && p.Truncated() {
				return nil // a server that cuts within a record
			}
			if err != nil {
				return fmt.Errorf("record %d: %w", len(p.records)+1, err)
			}
		}
	}
	return nil
}

// claimed returns the number of records that the header claims a section to have.
func (p *parser) claimed(section int) int {
	return int(binary.BigEndian.Uint16(p.wire[countsOffset+2+2*section:]))
}

// record walks one record.
func (p *parser) record(section int) error {
	owner := p.off
	fixed, end, respell, err := walkRecord(p.wire, owner)
	if err != nil {
		return err
	}
	p.off = end
	p.optLast = binary.BigEndian.Uint16(p.wire[fixed:]) == dns.TypeOPT
	if !p.optLast {
		p.keep(record{fixed: uint16(fixed), respell: respell}, section)
		return nil
	}
	if section != additional || p.opt || p.wire[owner] != 0 {
		return errOPT
	}
	p.opt = true
	return p.options(fixed, end)
}

// keep notes a record that is not OPT, and what is needed of it.
func (p *parser) keep(rec record, section int) {
	if section == authority && p.soa < 0 && binary.BigEndian.Uint16(p.wire[rec.fixed:]) == dns.TypeSOA {
		p.soa = len(p.records)
	}
	p.least = min(p.least, seconds(p.wire[rec.fixed+ttlOffset:]))
	p.respell = p.respell || rec.respell
	p.records = append(p.records, rec)
	p.counts[section]++
}

// options reads the OPT record whose fixed part is at fixed.
func (p *parser) options(fixed, end int) error {
	p.rcodeHigh = p.wire[fixed+ttlOffset]
	for options := p.wire[fixed+fixedLen : end]; len(options) > 0; {
		if len(options) < optionLen {
			return errOPT
		}
		next := optionLen + int(binary.BigEndian.Uint16(options[2:]))
		if next > len(options) {
			return errOPT
		}
		if binary.BigEndian.Uint16(options) == dns.EDNS0EDE && next >= extendedLen {
			p.extended = append(p.extended, options[:next]...)
		}
		options = options[next:]
	}
	return nil
}

// finish sets what depends on the whole of the reply.
func (p *parser) finish() {
	end := p.questionEnd
	if n := len(p.records); n > 0 {
		end = p.end(p.records[n-1])
	}
	p.wire = p.wire[:end]
	rcode := p.Rcode()
	p.negative = rcode == dns.RcodeNameError || rcode == dns.RcodeSuccess && !p.answered()
	switch {
	case p.Truncated():
	case rcode != dns.RcodeSuccess && rcode != dns.RcodeNameError:
		p.ttl = failureTTL
	case p.negative && p.soa >= 0:
		p.ttl = min(p.least, p.minimum(p.records[p.soa]))
	case rcode == dns.RcodeSuccess && !p.negative:
		p.ttl = p.least
	}
}

// minimum returns the last field of an SOA's data: the bound of the TTL of negative
// answers (RFC 2308, section 4).
func (r *Reply) minimum(soa record) uint32 {
	const twoNames, fiveNumbers = 2, 5 * 4
	end := r.end(soa)
	if end-int(soa.fixed)-fixedLen < twoNames+fiveNumbers {
		return 0
	}
	return seconds(r.wire[end-4:])
}

// seconds reads a TTL. The top bit is none that a TTL can have (RFC 2181,
// section 8).
func seconds(b []byte) uint32 {
	ttl := binary.BigEndian.Uint32(b)
	if ttl > math.MaxInt32 {
		return 0
	}
	return ttl
}

// optToEnd returns a message whose OPT record is followed by others, which is rare, with
// OPT as the last one. Leaving OPT out moves them, and with them whatever points at them,
// so that the message has to be made anew.
func optToEnd(wire []byte) ([]byte, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(wire); err != nil {
		return nil, err
	}
	for i, rr := range msg.Extra {
		if rr.Header().Rrtype == dns.TypeOPT {
			msg.Extra = append(append(msg.Extra[:i:i], msg.Extra[i+1:]...), rr)
			break
		}
	}
	msg.Compress = true
	wire, err := msg.Pack()
	if err != nil {
		return nil, err
	}
	// The library packs records that it cannot unpack: a TSIG record without data.
	if err := msg.Unpack(wire); err != nil {
		return nil, err
	}
	return wire, nil
}
