// Package reply holds nameservers' replies in wire form, and copies their records into responses to clients without
// unpacking them.
//
// The header and the OPT record of a response belong to one hop, so they are not made here. If the records come right
// behind the client's question, they have the same offsets as in the reply. So compressed names in their data can be
// copied as they are, whatever the type of the record is. If the records come behind CNAME records of the table, the
// pointers of compressed names are moved ([Place]).
package reply

import (
	"encoding/binary"
	"iter"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// failureTTL is how long a failure may be cached, in seconds. A failure is a reply with a response code other than
// NOERROR and NXDOMAIN, such as SERVFAIL. RFC 2308, section 7, and RFC 9520, section 3.2, allow 5 minutes, but a
// server that answers again should be noticed soon.
const failureTTL = 5

// A Reply is a nameserver's reply to a query with one question. It never changes
// and is safe for concurrent use.
type Reply struct {
	msg         []byte                // header, question and all records except OPT
	questionEnd int                   // where the question section ends in msg
	records     []record              // the records of msg, in order
	counts      [wire.Sections]uint16 // how many records each section has
	extended    []byte                // options of the nameserver's OPT record for the client: Extended DNS Errors
	relayed     bool                  // see ParseRelayed
	ttl         uint32                // how long the reply may be cached, in seconds; 0: not at all
	rcodeHigh   uint8                 // the high bits of the response code, from OPT (RFC 6891, section 6.1.3)
	aliases     int                   // see the method Aliases
	negative    bool                  // NXDOMAIN or NODATA
	respell     bool                  // at least one record has respell set
}

// A record says where one DNS record is in the field msg of a Reply. Each record begins where the previous one ends.
type record struct {
	fixed uint16 // where its fixed part begins, after the owner's name
	// respell is true if the owner's name is the question's name and begins with labels, and not with a pointer to the
	// question. Then the response must have these labels in the spelling of the client's question.
	respell bool
}

// Rcode returns the response code, including its bits in the OPT record.
func (r *Reply) Rcode() int {
	return int(r.rcodeHigh)<<4 | int(r.msg[wire.FlagsOffset+1]&wire.RcodeMask)
}

// Truncated reports whether the nameserver truncated the reply.
func (r *Reply) Truncated() bool { return r.msg[wire.FlagsOffset]&wire.TC != 0 }

// Answers returns the number of records in the answer section.
func (r *Reply) Answers() int { return int(r.counts[wire.AnswerSection]) }

// HasType reports whether a section has a record of the type rrtype.
func (r *Reply) HasType(section int, rrtype uint16) bool {
	first := 0
	for s := wire.AnswerSection; s < section; s++ {
		first += int(r.counts[s])
	}
	return slices.ContainsFunc(r.records[first:first+int(r.counts[section])], func(rec record) bool {
		return rrtype == r.typeOf(rec)
	})
}

// Data yields the data of the records in the answer section that have the type rrtype.
func (r *Reply) Data(rrtype uint16) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for _, rec := range r.records[:r.Answers()] {
			if rrtype == r.typeOf(rec) && !yield(r.msg[int(rec.fixed)+wire.FixedLen:r.end(rec)]) {
				return
			}
		}
	}
}

// Aliases returns how many records, from the first on, are CNAME records that lead from the question's name to another
// name. Signatures between CNAME records count, too.
func (r *Reply) Aliases() int { return r.aliases }

// Alias returns the target of the i-th record in lower case, if it is a CNAME record; i must be less than Aliases. The
// target is in the memory of buf.
func (r *Reply) Alias(i int, buf *[wire.MaxNameLen]byte) (target wire.Name, ok bool) {
	if r.typeOf(r.records[i]) != dns.TypeCNAME {
		return wire.Root, false
	}
	return wire.NameAt(r.msg, int(r.records[i].fixed)+wire.FixedLen, buf), true
}

// OptionsLen returns the length of what AppendOptions appends.
func (r *Reply) OptionsLen(stale bool) int {
	if stale {
		return len(r.extended) + wire.ExtendedErrorLen
	}
	return len(r.extended)
}

// AppendOptions appends options to a response that ends in an OPT record without options: the nameserver's Extended DNS
// Errors and, if stale is set, the error for a stale answer (RFC 8767).
func (r *Reply) AppendOptions(dst []byte, stale bool) []byte {
	length := len(dst) - 2
	dst = append(dst, r.extended...)
	if stale {
		code := dns.ExtendedErrorCodeStaleAnswer
		if r.Rcode() == dns.RcodeNameError {
			code = dns.ExtendedErrorCodeStaleNXDOMAINAnswer
		}
		dst = wire.AppendExtendedError(dst, code, "")
	}
	binary.BigEndian.PutUint16(dst[length:], uint16(len(dst)-length-2)) //nolint:gosec // within a message
	return dst
}

// Flags returns the two bytes of the nameserver's flags.
func (r *Reply) Flags() (first, second byte) {
	return r.msg[wire.FlagsOffset], r.msg[wire.FlagsOffset+1]
}

// Question returns the question section as the nameserver sent it. It may be empty, because some servers leave
// the question out when they send a failure. The caller must not change it.
func (r *Reply) Question() []byte { return r.msg[wire.HeaderLen:r.questionEnd:r.questionEnd] }

// Negative reports whether the reply is a negative answer: NXDOMAIN, or NOERROR without a
// record of the type asked for. A truncated reply is not negative.
func (r *Reply) Negative() bool { return r.negative && !r.Truncated() }

// TTL returns for how long the reply may be cached; ok is false if it must not be cached. For an answer, the result
// is the least TTL of the records. For a negative answer, it is also at most the MINIMUM of the SOA record. For a
// failure, it is 5 s. A TTL with the top bit set counts as 0 (RFC 2181, section 8). A truncated reply must not be
// cached, nor a negative answer without an SOA record (RFC 2308, section 5).
func (r *Reply) TTL() (ttl time.Duration, ok bool) {
	return time.Duration(r.ttl) * time.Second, r.ttl > 0
}

// Size returns the number of bytes that the reply occupies.
func (r *Reply) Size() int {
	return int(unsafe.Sizeof(*r)) + cap(r.msg) + cap(r.records)*int(unsafe.Sizeof(record{})) + cap(r.extended)
}

// typeOf returns the type of a record.
func (r *Reply) typeOf(rec record) uint16 { return binary.BigEndian.Uint16(r.msg[rec.fixed:]) }

// end returns where a record ends in msg.
func (r *Reply) end(rec record) int {
	return int(rec.fixed) + wire.FixedLen + int(binary.BigEndian.Uint16(r.msg[rec.fixed+wire.DataLenOffset:]))
}

// answered reports whether the answer section has a record of the type that the question asks for. It is false if
// there are only CNAME records that lead to another name.
func (r *Reply) answered() bool {
	if len(r.Question()) == 0 {
		return false
	}
	qtype := binary.BigEndian.Uint16(r.msg[r.questionEnd-4:])
	return qtype == dns.TypeANY && r.Answers() > 0 || r.HasType(wire.AnswerSection, qtype)
}

// Rcode returns the response code of a message of any opcode, including the bits in the OPT
// record (RFC 6891, section 6.1.3). If the message is malformed, it returns only the bits
// in the header.
func Rcode(msg []byte) int {
	if len(msg) < wire.HeaderLen {
		return dns.RcodeSuccess
	}
	rcode := int(msg[wire.FlagsOffset+1] & wire.RcodeMask)
	if wire.Count(msg, wire.AdditionalSection) == 0 {
		return rcode
	}
	questionEnd, err := wire.WalkQuestions(msg)
	if err != nil {
		return rcode
	}
	for w := wire.Walk(msg, questionEnd); w.Next(); {
		if w.Type() == dns.TypeOPT {
			return int(msg[w.Fixed+wire.TTLOffset])<<4 | rcode
		}
	}
	return rcode
}

// A Checker checks whether replies can be parsed, and classifies them. It does not allocate memory for each reply.
// The zero Checker is ready for use, and is safe for concurrent use.
type Checker struct {
	pool sync.Pool // of *Reply
}

// Check returns the response code of a reply, including its bits in the OPT record, and
// whether the reply is negative: NXDOMAIN, or NOERROR without what the question asks for. If [Parse] would return an
// error for the reply, Check returns the same error.
func (c *Checker) Check(msg []byte) (rcode int, negative bool, err error) {
	r, ok := c.pool.Get().(*Reply)
	if !ok {
		r = new(Reply)
	}
	parsed, err := parseInto(r, msg)
	if err == nil {
		rcode, negative = parsed.Rcode(), parsed.negative
	}
	*r = Reply{records: r.records[:0], extended: r.extended[:0]}
	c.pool.Put(r)
	return rcode, negative, err
}
