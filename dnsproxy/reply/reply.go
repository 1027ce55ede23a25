// Package reply holds nameservers' replies in wire form and makes responses to
// clients from them without unpacking them.
//
// A response equals the reply in every section. They differ only in the parts that belong
// to one hop or one client: the ID, RD and CD, the OPT record, the spelling of the
// question's name, and the TTLs of cached records. Since the client's question is as
// long as the reply's, every offset in the reply holds in the response too. So names in
// record data, whose place depends on the type, are copied as they are.
package reply

import (
	"encoding/binary"
	"sync"
	"time"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// failureTTL is the time in seconds for which a failure may be cached: SERVFAIL,
// REFUSED, NOTIMP, FORMERR and any other response code except NOERROR and NXDOMAIN. RFC 2308,
// section 7, and RFC 9520, section 3.2, allow 5 minutes, but a server that answers again
// should be noticed soon.
const failureTTL = 5

// A Reply is a nameserver's reply to a query with one question. It never changes
// and is safe for concurrent use.
type Reply struct {
	msg         []byte                // header, question and all records except OPT
	questionEnd int                   // where the question section ends in msg
	records     []record              // the records of msg, in order
	counts      [wire.Sections]uint16 // of records by section
	extended    []byte                // the Extended DNS Errors of the nameserver's OPT, as options
	ttl         uint32                // seconds; 0: not to be cached
	rcodeHigh   uint8                 // the bits of the response code that OPT has (RFC 6891, section 6.1.3)
	negative    bool                  // NXDOMAIN or NODATA
	respell     bool                  // respell is set in some record
}

// A record is the place of a record in a Reply. It begins where the previous record ends.
type record struct {
	fixed uint16 // where its fixed part begins, behind the owner
	// respell is true if the owner is the question's name, and more than a pointer to it.
	respell bool
}

// Rcode returns the response code, with the bits of it that OPT has.
func (r *Reply) Rcode() int {
	return int(r.rcodeHigh)<<4 | int(r.msg[wire.FlagsOffset+1]&wire.RcodeMask)
}

// Truncated reports whether the nameserver truncated the reply.
func (r *Reply) Truncated() bool { return r.msg[wire.FlagsOffset]&wire.TC != 0 }

// Answers returns the number of records in the answer section.
func (r *Reply) Answers() int { return int(r.counts[wire.AnswerSection]) }

// HasType reports whether the answer section has a record of the type rrtype.
func (r *Reply) HasType(rrtype uint16) bool {
	for _, rec := range r.records[:r.Answers()] {
		if rrtype == r.typeOf(rec) {
			return true
		}
	}
	return false
}

// Question returns the question section as the nameserver sent it. It is empty if
// there is none, as some servers leave it out when they fail. The caller must not
// change it.
func (r *Reply) Question() []byte { return r.msg[wire.HeaderLen:r.questionEnd:r.questionEnd] }

// Negative reports whether the reply is a negative answer: NXDOMAIN, or NOERROR without a
// record of the type asked for.
func (r *Reply) Negative() bool { return r.negative }

// TTL returns for how long the reply may be cached; ok is false if it must not be cached. For
// an answer, TTL is the least TTL of the records; for a negative answer, the SOA's MINIMUM
// bounds it, too. A negative answer without an SOA must not be cached (RFC 2308, section 5), nor
// a truncated reply. For a failure, TTL is 5 s. A TTL with the top bit set counts as 0 (RFC 2181,
// section 8).
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

// answered reports whether the answer section has what the question asks for, and
// not only aliases.
func (r *Reply) answered() bool {
	if len(r.Question()) == 0 {
		return false
	}
	qtype := binary.BigEndian.Uint16(r.msg[r.questionEnd-4:])
	return qtype == dns.TypeANY && r.Answers() > 0 || r.HasType(qtype)
}

// Rcode returns the response code of a message of any opcode, with the bits in its OPT
// record (RFC 6891, section 6.1.3). For a message that cannot be walked it returns the bits
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

// A Checker checks whether replies can be parsed, and classifies them, without an
// allocation for each reply. The zero Checker is ready for use, by any number of goroutines.
type Checker struct {
	pool sync.Pool // of *Reply
}

// Check returns the response code of a reply, with the bits of it that OPT has, and
// whether it is negative: NXDOMAIN, or NOERROR without what the question asks for. It
// returns the error of [Parse].
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
