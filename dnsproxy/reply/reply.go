// Package reply holds nameservers' replies in wire form and makes responses to
// clients from them without unpacking them.
//
// A response and its reply differ only in the parts that belong
// to one hop or one client: the ID, RD and CD, the OPT record, the spelling of the
// question's name, and the TTLs of cached records. The client's question is as
// long as the reply's, so everything after it has the same offset in both messages. Compressed names in record data can
// therefore be copied as they are, and this package need not know which types of records have names in their data.
package reply

import (
	"encoding/binary"
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
	extended    []byte                // the Extended DNS Errors of the nameserver's OPT record, as options
	ttl         uint32                // how long the reply may be cached, in seconds; 0: not at all
	rcodeHigh   uint8                 // the high bits of the response code, from OPT (RFC 6891, section 6.1.3)
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

// HasType reports whether the answer section has a record of the type rrtype.
func (r *Reply) HasType(rrtype uint16) bool {
	for _, rec := range r.records[:r.Answers()] {
		if rrtype == r.typeOf(rec) {
			return true
		}
	}
	return false
}

// Question returns the question section as the nameserver sent it. It may be empty, because some servers leave
// the question out when they send a failure. The caller must not change it.
func (r *Reply) Question() []byte { return r.msg[wire.HeaderLen:r.questionEnd:r.questionEnd] }

// Negative reports whether the reply is a negative answer: NXDOMAIN, or NOERROR without a
// record of the type asked for.
func (r *Reply) Negative() bool { return r.negative }

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
	return qtype == dns.TypeANY && r.Answers() > 0 || r.HasType(qtype)
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
