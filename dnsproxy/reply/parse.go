package reply

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

var (
	errNoReply   = errors.New("the message is not a reply to a query")
	errLong      = errors.New("the message is longer than 65535 bytes")
	errQuestions = errors.New("the message does not have exactly one question")
	errOPT       = errors.New("an OPT record is malformed, misplaced or repeated")
)

// Parse parses a nameserver's reply. The reply must have the opcode QUERY and one question. If it has no records, it
// may have no question either, because some servers send such failures. A truncated reply may end anywhere; Parse
// keeps the records that are whole. It drops bytes after the last record.
//
// The Reply refers to the memory of msg, so the caller must not change msg afterwards.
func Parse(msg []byte) (*Reply, error) {
	r, err := parseInto(new(Reply), msg)
	if err != nil {
		return nil, fmt.Errorf("parsing a reply: %w", err)
	}
	return r, nil
}

// ParseRelayed is like Parse for a reply that is only for one client. The Reply keeps all options of the OPT record that
// are not only for neighbours.
func ParseRelayed(msg []byte) (*Reply, error) { return parseInto(&Reply{relayed: true}, msg) }

// parseInto is like parse, but stores the result in r. r must be empty, except for memory that may be used again.
func parseInto(r *Reply, msg []byte) (*Reply, error) {
	switch {
	case len(msg) < wire.HeaderLen:
		return nil, wire.ErrShort
	case len(msg) > dns.MaxMsgSize:
		return nil, errLong
	case msg[wire.FlagsOffset]&(wire.QR|wire.OpcodeMask) != wire.QR:
		return nil, errNoReply
	}
	r.msg = msg
	p := parser{Reply: r, leastTTL: math.MaxUint32, soa: -1, alias: wire.HeaderLen}
	questions := wire.Count(msg, wire.QuestionSection)
	if questions > 1 {
		return nil, errQuestions
	}
	p.questionEnd = wire.HeaderLen
	if questions == 1 {
		var err error
		if p.questionEnd, err = wire.WalkQuestion(msg, wire.HeaderLen); err != nil {
			return nil, fmt.Errorf("question: %w", err)
		}
	}
	if err := p.walk(); err != nil {
		return nil, err
	}
	switch {
	case questions == 0 && len(p.records) > 0:
		return nil, errQuestions
	case p.optEnd > 0 && !p.optLast:
		moved, err := optToEnd(msg[:p.end(p.records[len(p.records)-1])], p.optStart, p.optEnd)
		if err != nil {
			return nil, err
		}
		return parseInto(&Reply{relayed: r.relayed}, moved)
	}
	p.finish()
	return p.Reply, nil
}

// A parser is a Reply that is being parsed.
type parser struct {
	*Reply
	leastTTL         uint32 // the least TTL so far
	soa              int    // index of the SOA in the authority section, or -1
	alias            int    // where the name is that the next CNAME record must have; 0 behind the last one
	optStart, optEnd int    // where the OPT record is; optEnd is 0 if there is none
	optLast          bool   // whether the last record so far is the OPT record
}

// walk walks all records.
func (p *parser) walk() error {
	total := 0
	for section := wire.AnswerSection; section < wire.Sections; section++ {
		total += wire.Count(p.msg, section)
	}
	// The header's counts may be wrong, so reserve no more records than the message has room for. The shortest
	// record is one for the root, without data.
	if n := min(total, (len(p.msg)-p.questionEnd)/(1+wire.FixedLen)); cap(p.records) < n {
		p.records = make([]record, 0, n)
	}
	w := wire.Walk(p.msg, p.questionEnd)
	for w.Next() {
		if err := p.record(&w); err != nil {
			return fmt.Errorf("record %d: %w", len(p.records)+1, err)
		}
	}
	if w.Err == nil || errors.Is(w.Err, wire.ErrShort) && p.Truncated() { // some servers truncate within a record
		return nil
	}
	return fmt.Errorf("record %d: %w", len(p.records)+1, w.Err)
}

// record notes the record that the walker is at.
func (p *parser) record(w *wire.Walker) error {
	rrtype := w.Type()
	p.optLast = rrtype == dns.TypeOPT
	if p.optLast {
		if w.Section != wire.AdditionalSection || p.optEnd > 0 || p.msg[w.Owner] != 0 {
			return errOPT
		}
		p.optStart, p.optEnd = w.Owner, w.End
		return p.options(w.Fixed, w.End)
	}
	if rrtype == dns.TypeSOA && w.Section == wire.AuthoritySection && p.soa < 0 {
		p.soa = len(p.records)
	}
	if p.alias > 0 {
		p.follow(w, rrtype)
	}
	p.leastTTL = min(p.leastTTL, seconds(p.msg[w.Fixed+wire.TTLOffset:]))
	p.respell = p.respell || w.Spelled
	p.records = append(p.records, record{fixed: uint16(w.Fixed), respell: w.Spelled}) //nolint:gosec // within a message
	p.counts[w.Section]++
	return nil
}

// follow counts a record for the method Aliases.
func (p *parser) follow(w *wire.Walker, rrtype uint16) {
	if (rrtype == dns.TypeRRSIG || rrtype == dns.TypeDNAME) && w.Section == wire.AnswerSection { // RFC 6672, section 3.1
		return
	}
	var x, y [wire.MaxNameLen]byte
	data := w.Fixed + wire.FixedLen
	end, _, err := wire.WalkName(p.msg, data)
	if rrtype != dns.TypeCNAME || w.Section != wire.AnswerSection || err != nil || end != w.End ||
		wire.NameAt(p.msg, p.alias, &x) != wire.NameAt(p.msg, w.Owner, &y) {
		p.alias = 0
		return
	}
	p.alias, p.aliases = data, len(p.records)+1
}

// options reads the OPT record whose fixed part is at fixed.
func (p *parser) options(fixed, end int) error {
	p.rcodeHigh = p.msg[fixed+wire.TTLOffset]
	for rest := p.msg[fixed+wire.FixedLen : end]; len(rest) > 0; {
		code, option, next, ok := wire.CutOption(rest)
		if !ok {
			return errOPT
		}
		if code == dns.EDNS0EDE && len(option) >= wire.ExtendedErrorLen || p.relayed && !wire.HopByHop(code, option) {
			p.extended = append(p.extended, option...)
		}
		rest = next
	}
	return nil
}

// finish sets the fields that depend on the whole reply.
func (p *parser) finish() {
	end := p.questionEnd
	if n := len(p.records); n > 0 {
		end = p.end(p.records[n-1])
	}
	p.msg = p.msg[:end]
	rcode := p.Rcode()
	p.negative = rcode == dns.RcodeNameError || rcode == dns.RcodeSuccess && !p.answered()
	switch {
	case p.Truncated():
	case rcode != dns.RcodeSuccess && rcode != dns.RcodeNameError:
		p.ttl = failureTTL
	case p.negative && p.soa >= 0:
		p.ttl = min(p.leastTTL, p.minimum(p.records[p.soa]))
	case rcode == dns.RcodeSuccess && !p.negative:
		p.ttl = p.leastTTL
	}
}

// minimum returns the last field of an SOA's data: the bound of the TTL of negative
// answers (RFC 2308, section 4).
func (r *Reply) minimum(soa record) uint32 {
	end := r.end(soa)
	if end-int(soa.fixed)-wire.FixedLen < soaLen {
		return 0
	}
	return seconds(r.msg[end-4:])
}

// soaLen is the least length of the data of an SOA record: two names and five numbers (RFC 1035, section 3.3.13).
const soaLen = 2 + 5*4

// seconds reads a TTL. A TTL with the top bit set counts as 0 (RFC 2181, section 8).
func seconds(b []byte) uint32 {
	ttl := binary.BigEndian.Uint32(b)
	if ttl > math.MaxInt32 {
		return 0
	}
	return ttl
}

// optToEnd returns a well-formed message with its OPT record, which begins at start and ends at end, moved to the end. It
// is for the rare message in which other records follow the OPT record. It fails if names in them point into the OPT
// record.
func optToEnd(msg []byte, start, end int) ([]byte, error) {
	out := slices.Concat(msg[:start], msg[end:], msg[start:end])
	m := mover{response: out, hole: start, questionEnd: end, owner: wire.HeaderLen, shift: start - end}
	questionEnd, err := wire.WalkQuestions(msg)
	for w := wire.Walk(msg, questionEnd); w.Next() && err == nil; {
		fixed := w.Fixed + m.shift
		if w.Owner >= end && (m.name(w.Owner+m.shift, fixed) == 0 || !m.data(w.Type(), fixed+wire.FixedLen, w.End+m.shift)) {
			err = errOPT
		}
	}
	return out, err
}
