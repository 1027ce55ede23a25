package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// staleTTL is the TTL of stale records, in seconds (RFC 8767, section 4).
const staleTTL = 30

// A Request says which query a response is for, and which form it must have.
type Request struct {
	// Query is the client's packet up to the end of its question section. The question must be the same as that of the
	// reply, except for the case of letters.
	Query []byte
	// EDNS reports that the query had an OPT record, and DO that its DO bit was set.
	EDNS, DO bool
	// UDPSize is the payload size that the response's OPT record offers, in bytes.
	UDPSize uint16
	// KeepAD reports whether the response has the AD bit of the reply. If KeepAD is false, the bit is cleared.
	KeepAD bool
	// Limit is how long the response may be, in bytes; it must be at least 512. If the response would be longer,
	// records are left out at the end, and TC is set. If only additional records are left out, TC is set only in a
	// referral.
	Limit int
}

// An Age says whether a reply comes from the cache, and how long it was there. The zero
// Age is for a reply straight from the nameserver; it changes neither TTLs nor the AA bit.
type Age struct {
	// Cached reports whether the reply comes from the cache. Then the response has no AA bit, and its TTLs are lower
	// by Seconds.
	Cached  bool
	Seconds uint32
	// Max bounds the TTLs in seconds, before Seconds is subtracted; 0 is no bound.
	Max uint32
	// Stale reports whether the reply has expired. Cached is then true, too. In the response every TTL is 30, and
	// the AD bit is cleared, because signatures are not valid for longer than the TTL. For a client with EDNS, the
	// response has an Extended DNS Error (RFC 8767, RFC 8914).
	Stale bool
}

// Append appends to dst the response to q. The memory of dst and of q.Query must not overlap. Append does not allocate
// if dst has room for Limit bytes.
func (r *Reply) Append(dst []byte, q *Request, age Age) []byte {
	start := len(dst)
	stale := age.Stale && q.EDNS
	fit := r.fit(q, stale)
	dst = append(dst, q.Query...)
	dst = append(dst, r.msg[r.questionEnd:fit.end]...)
	if age.Cached || r.respell {
		r.rewrite(dst[start:], fit.records, age)
	}
	if q.EDNS {
		dst = r.appendOPT(dst, q)
		if !fit.cut {
			dst = r.appendExtended(dst, stale)
		}
		fit.counts[wire.AdditionalSection]++
	}
	r.header(dst[start:], q, age)
	if fit.cut {
		dst[start+wire.FlagsOffset] |= wire.TC
	}
	fit.counts[wire.QuestionSection] = 1
	wire.PutCounts(dst[start:], &fit.counts)
	return dst
}

// A fit is the part of a reply that fits a response.
type fit struct {
	records int // how many records, from the first on
	end     int // where these records end in the reply
	counts  [wire.Sections]uint16
	cut     bool // whether anything is left out that clients should ask for again
}

// leaveOutAdditional removes the additional records from f, a part of r.
func (f *fit) leaveOutAdditional(r *Reply) {
	f.records -= int(f.counts[wire.AdditionalSection])
	f.counts[wire.AdditionalSection] = 0
	if f.end = r.questionEnd; f.records > 0 {
		f.end = r.end(r.records[f.records-1])
	}
}

// fit returns the part of the reply that fits. If not everything fits, Extended DNS Errors are left out first, and
// then records; the response has TC in both cases (RFC 8914, section 3). The OPT record is never left out (RFC 6891,
// section 7). If not all additional records fit, all of them are left out, because an RRset must not be sent in part.
// If nothing else is left out, only a referral has TC (RFC 2181, section 9).
func (r *Reply) fit(q *Request, stale bool) fit {
	whole := fit{records: len(r.records), end: len(r.msg), counts: r.counts}
	room := q.Limit - len(q.Query) + r.questionEnd // how long the part of r.msg may be
	options := 0
	if !q.EDNS {
		if len(r.msg) <= room {
			return whole
		}
	} else {
		room -= wire.OPTLen
		options = len(r.extended)
		if stale {
			options += wire.ExtendedErrorLen
		}
		if len(r.msg)+options <= room {
			return whole
		}
	}
	f := fit{end: r.questionEnd, cut: true}
	for section, n := range r.counts {
		for range n {
			end := r.end(r.records[f.records])
			if end > room {
				if section == wire.AdditionalSection {
					f.leaveOutAdditional(r)
					f.cut = options > 0 || r.referral()
				}
				return f
			}
			f.end = end
			f.records++
			f.counts[section]++
		}
	}
	return f
}

// referral reports whether the reply refers a resolver to other nameservers.
func (r *Reply) referral() bool {
	ns, soa := false, false
	for _, rec := range r.records[r.Answers() : r.Answers()+int(r.counts[wire.AuthoritySection])] {
		rrtype := r.typeOf(rec)
		ns, soa = ns || rrtype == dns.TypeNS, soa || rrtype == dns.TypeSOA
	}
	return isReferral(r.Rcode(), r.Answers(), ns, soa)
}

// rewrite changes the first n records of msg. msg has the header and the question of the client, and the records of
// the reply. Names of owners get the question's spelling, and TTLs are set as age says.
func (r *Reply) rewrite(msg []byte, n int, age Age) {
	owner := r.questionEnd
	for i, rec := range r.records[:n] {
		if rec.respell {
			respell(msg, owner)
		}
		if age.Cached {
			ttl := uint32(staleTTL)
			if !age.Stale {
				ttl = r.recordTTL(i)
				if age.Max > 0 {
					ttl = min(ttl, age.Max)
				}
				ttl -= min(ttl, age.Seconds)
			}
			binary.BigEndian.PutUint32(msg[rec.fixed+wire.TTLOffset:], ttl)
		}
		owner = r.end(rec)
	}
}

// recordTTL returns the TTL of a record in seconds, before it is counted down in the cache. The TTL of the SOA
// record of a negative answer is at most the MINIMUM of this record. Otherwise clients would count the MINIMUM from
// the time at which they received the record (RFC 2308, section 5).
func (r *Reply) recordTTL(i int) uint32 {
	rec := r.records[i]
	ttl := seconds(r.msg[rec.fixed+wire.TTLOffset:])
	inAuthority := i >= r.Answers() && i < r.Answers()+int(r.counts[wire.AuthoritySection])
	if r.negative && inAuthority && r.typeOf(rec) == dns.TypeSOA {
		return min(ttl, r.minimum(rec))
	}
	return ttl
}

// respell changes the owner's name at offset to the spelling of the question. The two names must be equal except for
// the case of letters. respell changes the labels, and makes the pointer after them point to the question. The name
// keeps its length.
func respell(msg []byte, offset int) {
	for question := wire.HeaderLen; msg[offset] != 0; {
		if wire.IsPointer(msg[offset]) {
			binary.BigEndian.PutUint16(msg[offset:], wire.PointerBits|uint16(question)) //nolint:gosec // within the question
			return
		}
		n := 1 + int(msg[offset])
		copy(msg[offset:offset+n], msg[question:question+n])
		offset += n
		question += n
	}
}

// appendOPT appends this agent's OPT record, without options.
func (r *Reply) appendOPT(dst []byte, q *Request) []byte {
	ttl := uint32(r.rcodeHigh) << 24
	if q.DO {
		ttl |= wire.OPTDO
	}
	return wire.AppendOPT(dst, q.UDPSize, ttl)
}

// appendExtended appends Extended DNS Errors to the OPT record at the end of dst: the
// nameserver's errors and, if stale is set, the error for a stale answer.
func (r *Reply) appendExtended(dst []byte, stale bool) []byte {
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

// header turns the client's header in msg into the header of the response. It clears the Z bit. It does not set the
// counts, nor the TC bit of a response from which records were left out.
func (r *Reply) header(msg []byte, q *Request, age Age) {
	first, second := r.msg[wire.FlagsOffset], r.msg[wire.FlagsOffset+1]
	keep := byte(wire.QR | wire.AA | wire.TC)
	if age.Cached {
		keep &^= wire.AA
	}
	msg[wire.FlagsOffset] = first&keep | msg[wire.FlagsOffset]&wire.RD

	keep = wire.RA | wire.AD | wire.RcodeMask
	if !q.KeepAD || age.Stale {
		keep &^= wire.AD
	}
	if !q.EDNS && r.rcodeHigh != 0 {
		// Without the OPT record, the response has only the low four bits of the response code, and they mean
		// something else: BADVERS (16) would become NOERROR (0).
		second = second&^wire.RcodeMask | dns.RcodeServerFailure
	}
	msg[wire.FlagsOffset+1] = second&keep | msg[wire.FlagsOffset+1]&wire.CD
}
