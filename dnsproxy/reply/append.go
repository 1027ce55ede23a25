package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// The lengths of an OPT record without options, of an option without its value
// (RFC 6891, section 6.1.2), and of an Extended DNS Error without text (RFC 8914,
// section 2).
const (
	optLen      = 11
	optionLen   = 4
	extendedLen = optionLen + 2
)

// optDO is the bit in OPT's TTL that says DNSSEC OK.
const optDO = 0x8000

// staleTTL is the TTL of stale records, in seconds (RFC 8767, section 4).
const staleTTL = 30

// A Request is what a response copies from the client's query, and how the client
// wants it.
type Request struct {
	// Query is the client's packet up to the end of its question section. The
	// question must be the reply's; only the name's case may differ.
	Query []byte
	// EDNS says that the query had an OPT record, and DO what it said.
	EDNS, DO bool
	// UDPSize is what our OPT record says we take over UDP, in bytes.
	UDPSize uint16
	// KeepAD leaves AD as the nameserver set it; without, it is cleared.
	KeepAD bool
	// Limit is how long the response may be, in bytes: at least 512. What does not
	// fit is cut off at a record's boundary, with TC=1 unless it is additional RRsets
	// alone and the reply is no referral.
	Limit int
}

// An Age says where a reply was since it came. The zero Age is that of one straight
// from the nameserver: its TTLs are right as they are, its AA bit too.
type Age struct {
	// Cached clears AA and counts TTLs down, by Seconds.
	Cached  bool
	Seconds uint32
	// Max bounds TTLs before they are counted down, in seconds; 0 is no bound.
	Max uint32
	// Stale is for a reply that expired, Cached too: it makes every TTL 30, clears
	// AD, since signatures are not good for longer than the TTL, and tells clients
	// with EDNS by an Extended DNS Error (RFC 8767, RFC 8914).
	Stale bool
}

// Append appends the response to q to dst, whose memory must not overlap q's. It
// does not allocate if dst has room for Limit bytes.
func (r *Reply) Append(dst []byte, q *Request, age Age) []byte {
	start := len(dst)
	stale := age.Stale && q.EDNS
	fit := r.fit(q, stale)
	dst = append(dst, q.Query...)
	dst = append(dst, r.wire[r.questionEnd:fit.end]...)
	if age.Cached || r.respell {
		r.rewrite(dst[start:], fit.records, age)
	}
	if q.EDNS {
		dst = r.appendOPT(dst, q)
		if !fit.cut {
			dst = r.appendExtended(dst, stale)
		}
		fit.counts[additional]++
	}
	r.header(dst[start:], q, age)
	if fit.cut {
		dst[start+flagsOffset] |= bitTC
	}
	counts := dst[start+countsOffset:]
	binary.BigEndian.PutUint16(counts, 1)
	for section, n := range fit.counts {
		binary.BigEndian.PutUint16(counts[2+2*section:], n)
	}
	return dst
}

// A fit is what of a reply fits a response.
type fit struct {
	records int // the first of them
	end     int // where they end in the reply
	counts  [sections]uint16
	cut     bool // whether anything stays out that clients should ask for again
}

// fit returns what fits: records are cut only after Extended DNS Errors were left
// out, and TC says both (RFC 8914, section 3). OPT stays (RFC 6891, section 7). Additional
// RRsets are left out as wholes, and TC does not tell of those (RFC 2181, section 9).
func (r *Reply) fit(q *Request, stale bool) fit {
	whole := fit{records: len(r.records), end: len(r.wire), counts: r.counts}
	room := q.Limit - len(q.Query) + r.questionEnd // for r.wire up to some record
	options := 0
	if !q.EDNS {
		if len(r.wire) <= room {
			return whole
		}
	} else {
		room -= optLen
		options = len(r.extended)
		if stale {
			options += extendedLen
		}
		if len(r.wire)+options <= room {
			return whole
		}
	}
	f := fit{end: r.questionEnd, cut: true}
	for section, n := range r.counts {
		for range n {
			end := r.end(r.records[f.records])
			if end > room {
				if section == additional {
					r.leaveOut(&f)
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

// leaveOut takes those additional records out of f whose RRset is not in it as a whole.
func (r *Reply) leaveOut(f *fit) {
	first := f.records - int(f.counts[additional])
	at := func(i int) place {
		owner := r.questionEnd
		if i += first; i > 0 {
			owner = r.end(r.records[i-1])
		}
		return place{owner: owner, fixed: int(r.records[i].fixed)}
	}
	kept := wholeSets(r.wire, at, int(f.counts[additional]), len(r.records)-first)
	f.records = first + kept
	f.counts[additional] = uint16(kept) //nolint:gosec // no more than before
	f.end = at(kept).owner
}

// referral reports whether the reply sends a resolver on to other nameservers.
func (r *Reply) referral() bool {
	ns, soa := false, false
	for _, rec := range r.records[r.counts[answer] : r.counts[answer]+r.counts[authority]] {
		rrtype := binary.BigEndian.Uint16(r.wire[rec.fixed:])
		ns, soa = ns || rrtype == dns.TypeNS, soa || rrtype == dns.TypeSOA
	}
	return isReferral(r.Rcode(), r.Answers(), ns, soa)
}

// rewrite gives the first n records of msg, which holds the client's question and
// the reply's records, the question's spelling and TTLs by age.
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
			binary.BigEndian.PutUint32(msg[rec.fixed+ttlOffset:], ttl)
		}
		owner = r.end(rec)
	}
}

// recordTTL returns the TTL of a record in a cache, in seconds: that of the SOA of
// a negative answer is bounded by its MINIMUM, or clients would count that from the
// time they got it (RFC 2308, section 5).
func (r *Reply) recordTTL(i int) uint32 {
	rec := r.records[i]
	ttl := seconds(r.wire[rec.fixed+ttlOffset:])
	inAuthority := i >= int(r.counts[answer]) && i < int(r.counts[answer])+int(r.counts[authority])
	if r.negative && inAuthority && binary.BigEndian.Uint16(r.wire[rec.fixed:]) == dns.TypeSOA {
		return min(ttl, r.minimum(rec))
	}
	return ttl
}

// respell gives the owner name at off, which is the question's, the question's
// spelling: its labels, and the place that a pointer at its end leads to. It keeps
// its length.
func respell(msg []byte, off int) {
	for question := headerLen; msg[off] != 0; {
		if msg[off]&labelType == labelType {
			binary.BigEndian.PutUint16(msg[off:], pointerBits|uint16(question))
			return
		}
		n := 1 + int(msg[off])
		copy(msg[off:off+n], msg[question:question+n])
		off += n
		question += n
	}
}

// appendOPT appends our OPT record without options.
func (r *Reply) appendOPT(dst []byte, q *Request) []byte {
	var flags uint16
	if q.DO {
		flags = optDO
	}
	const root, version, noOptions = 0, 0, 0
	dst = append(dst, root)
	dst = binary.BigEndian.AppendUint16(dst, dns.TypeOPT)
	dst = binary.BigEndian.AppendUint16(dst, q.UDPSize)
	dst = append(dst, r.rcodeHigh, version)
	dst = binary.BigEndian.AppendUint16(dst, flags)
	return binary.BigEndian.AppendUint16(dst, noOptions)
}

// appendExtended appends Extended DNS Errors, the nameserver's and that of a stale
// answer, to the OPT record that dst ends with.
func (r *Reply) appendExtended(dst []byte, stale bool) []byte {
	length := len(dst) - 2
	dst = append(dst, r.extended...)
	if stale {
		code := dns.ExtendedErrorCodeStaleAnswer
		if r.Rcode() == dns.RcodeNameError {
			code = dns.ExtendedErrorCodeStaleNXDOMAINAnswer
		}
		dst = binary.BigEndian.AppendUint16(dst, dns.EDNS0EDE)
		dst = binary.BigEndian.AppendUint16(dst, extendedLen-optionLen)
		dst = binary.BigEndian.AppendUint16(dst, code)
	}
	binary.BigEndian.PutUint16(dst[length:], uint16(len(dst)-length-2))
	return dst
}

// header makes the client's header in msg the response's, but for the counts and
// a TC of ours. Z is cleared.
func (r *Reply) header(msg []byte, q *Request, age Age) {
	first, second := r.wire[flagsOffset], r.wire[flagsOffset+1]
	keep := byte(bitQR | bitAA | bitTC)
	if age.Cached {
		keep &^= bitAA
	}
	msg[flagsOffset] = first&keep | msg[flagsOffset]&bitRD

	keep = bitRA | bitAD | maskRcode
	if !q.KeepAD || age.Stale {
		keep &^= bitAD
	}
	if !q.EDNS && r.rcodeHigh != 0 {
		// The low bits alone say something else: BADVERS would be NOERROR.
		second = second&^maskRcode | dns.RcodeServerFailure
	}
	msg[flagsOffset+1] = second&keep | msg[flagsOffset+1]&bitCD
}
