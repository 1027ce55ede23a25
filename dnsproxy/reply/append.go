package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// staleTTL is the TTL of stale records, in seconds (RFC 8767, section 4).
const staleTTL = 30

// A Request has what a response copies from the client's query, and the form of the response that
// the client wants.
type Request struct {
	// Query is the client's packet up to the end of its question section. The
	// question must be the reply's; only the name's case may differ.
	Query []byte
	// EDNS reports that the query had an OPT record, and DO that its DO bit was set.
	EDNS, DO bool
	// UDPSize is the payload size that the response's OPT record offers, in bytes.
	UDPSize uint16
	// KeepAD keeps AD as the nameserver set it; without KeepAD, AD is cleared.
	KeepAD bool
	// Limit is how long the response may be, in bytes: at least 512. A longer response is
	// cut at a record's boundary, and TC is set. If only additional records are left out, TC
	// is set only in a referral.
	Limit int
}

// An Age tells whether a reply comes from the cache, and for how long it was there. The zero
// Age means a reply straight from the nameserver, whose TTLs and AA bit are kept.
type Age struct {
	// Cached clears AA and counts TTLs down by Seconds.
	Cached  bool
	Seconds uint32
	// Max bounds TTLs before they are counted down, in seconds; 0 is no bound.
	Max uint32
	// Stale is for a reply that has expired, for which Cached is set too. It makes every TTL 30, clears AD, because
	// signatures are not valid for longer than the TTL, and adds an Extended DNS Error for clients with EDNS (RFC 8767,
	// RFC 8914).
	Stale bool
}

// Append appends the response to q to dst, whose memory must not overlap q's. It
// does not allocate if dst has room for Limit bytes.
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

// leaveOutAdditional removes the additional records from f, which has records of r.
func (f *fit) leaveOutAdditional(r *Reply) {
	f.records -= int(f.counts[wire.AdditionalSection])
	f.counts[wire.AdditionalSection] = 0
	if f.end = r.questionEnd; f.records > 0 {
		f.end = r.end(r.records[f.records-1])
	}
}

// fit returns the part of the reply that fits. Extended DNS Errors are left out before records are, and TC is set in
// either case (RFC 8914, section 3). OPT stays (RFC 6891, section 7). If not all additional records fit, none is kept:
// an RRset must not be there in part. Without them, TC is set only in a referral (RFC 2181, section 9).
func (r *Reply) fit(q *Request, stale bool) fit {
	whole := fit{records: len(r.records), end: len(r.msg), counts: r.counts}
	room := q.Limit - len(q.Query) + r.questionEnd // for r.msg up to some record
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

// rewrite changes the first n records of msg, which consists of the client's header and question
// and the reply's records. Owners get the question's spelling, and TTLs are set as age says.
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

// recordTTL returns the TTL of a record in a cache, in seconds. The TTL of a negative
// answer's SOA is bounded by its MINIMUM; otherwise clients would count the MINIMUM from the
// time at which they received it (RFC 2308, section 5).
func (r *Reply) recordTTL(i int) uint32 {
	rec := r.records[i]
	ttl := seconds(r.msg[rec.fixed+wire.TTLOffset:])
	inAuthority := i >= r.Answers() && i < r.Answers()+int(r.counts[wire.AuthoritySection])
	if r.negative && inAuthority && r.typeOf(rec) == dns.TypeSOA {
		return min(ttl, r.minimum(rec))
	}
	return ttl
}

// respell gives the owner name at off, which equals the question's name, the spelling of
// the question: it changes the labels, and the target of the pointer at their end. The
// name keeps its length.
func respell(msg []byte, off int) {
	for question := wire.HeaderLen; msg[off] != 0; {
		if wire.IsPointer(msg[off]) {
			binary.BigEndian.PutUint16(msg[off:], wire.PointerBits|uint16(question)) //nolint:gosec // within the question
			return
		}
		n := 1 + int(msg[off])
		copy(msg[off:off+n], msg[question:question+n])
		off += n
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

// header turns the client's header in msg into the response's, except for the counts and
// the TC of a response that is cut. Z is cleared.
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
		// The low bits alone mean something else: BADVERS would be NOERROR.
		second = second&^wire.RcodeMask | dns.RcodeServerFailure
	}
	msg[wire.FlagsOffset+1] = second&keep | msg[wire.FlagsOffset+1]&wire.CD
}
