// Package reply holds nameservers' replies in wire form and makes responses to
// clients of them without unpacking them.
//
// A response equals the reply in every section. What differs is what belongs to
// one hop or one client: the ID, RD and CD, the OPT record, the spelling of the
// question's name, and TTLs of what was cached. Since the client's question is as
// long as the reply's, every offset in the reply holds in the response too, so
// that names in record data, whose place only the type knows, are copied as they
// are.
package reply

import (
	"encoding/binary"
	"time"
	"unsafe"

	"github.com/miekg/dns"
)

// failureTTL is the time in seconds for which a failure may be repeated: SERVFAIL,
// REFUSED, NOTIMP, FORMERR and whatever else is no answer. RFC 2308, section 7, and
// RFC 9520, section 3.2, allow 5 minutes; a server that is back should be seen at once.
const failureTTL = 5

// A Reply is a nameserver's reply to a query with one question. It never changes
// and is safe for concurrent use.
type Reply struct {
	wire        []byte   // header, question and all records but OPT
	questionEnd int      // where the question section ends in wire
	records     []record // those of wire, in order
	counts      [sections]uint16
	extended    []byte // the Extended DNS Errors of the nameserver's OPT, as options
	ttl         uint32 // seconds; 0: not to be cached
	rcodeHigh   uint8  // the bits of the rcode that OPT has (RFC 6891, section 6.1.3)
	negative    bool   // NXDOMAIN or NODATA
	respell     bool   // some record has it
}

// A record is where one is in a Reply. It begins where the one before ends.
type record struct {
	fixed uint16 // where its type is, behind the owner
	// respell is set if the owner is the question's name, but no pointer to it.
	respell bool
}

// The sections that have records, and their number.
const (
	answer = iota
	authority
	additional
	sections
)

// Rcode returns the response code, with the bits of it that OPT has.
func (r *Reply) Rcode() int { return int(r.rcodeHigh)<<4 | int(r.wire[flagsOffset+1]&maskRcode) }

// Truncated reports whether the nameserver cut the reply.
func (r *Reply) Truncated() bool { return r.wire[flagsOffset]&bitTC != 0 }

// Answers returns the number of records in the answer section.
func (r *Reply) Answers() int { return int(r.counts[answer]) }

// HasType reports whether the answer section has a record of the type rrtype.
func (r *Reply) HasType(rrtype uint16) bool {
	for _, rec := range r.records[:r.counts[answer]] {
		if rrtype == binary.BigEndian.Uint16(r.wire[rec.fixed:]) {
			return true
		}
	}
	return false
}

// Question returns the question section as the nameserver sent it. It is empty if
// there is none, as some servers leave it out when they fail. The caller must not
// change it.
func (r *Reply) Question() []byte { return r.wire[headerLen:r.questionEnd:r.questionEnd] }

// Negative reports whether the reply says that there is no such name, or nothing of the
// type asked for.
func (r *Reply) Negative() bool { return r.negative }

// TTL returns for how long the reply may be cached; ok is false if it must not be. That is the least TTL of its records, for NXDOMAIN and NODATA
// with the SOA's MINIMUM among them and not without an SOA (RFC 2308, section 5),
// and 5 s for a failure. A TTL with the top bit set counts as 0 (RFC 2181,
// section 8).
func (r *Reply) TTL() (ttl time.Duration, ok bool) {
	return time.Duration(r.ttl) * time.Second, r.ttl > 0
}

// Size returns the number of bytes that the reply occupies.
func (r *Reply) Size() int {
	return int(unsafe.Sizeof(*r)) + cap(r.wire) + cap(r.records)*int(unsafe.Sizeof(record{})) + cap(r.extended)
}

// end returns where a record ends in wire.
func (r *Reply) end(rec record) int {
	return int(rec.fixed) + fixedLen + int(binary.BigEndian.Uint16(r.wire[rec.fixed+lengthOffset:]))
}

// answered reports whether the answer section has what the question asks for, and
// not just aliases on the way to it.
func (r *Reply) answered() bool {
	if len(r.Question()) == 0 {
		return false
	}
	qtype := binary.BigEndian.Uint16(r.wire[r.questionEnd-4:])
	return qtype == dns.TypeANY && r.counts[answer] > 0 || r.HasType(qtype)
}
