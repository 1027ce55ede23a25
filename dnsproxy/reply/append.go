package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// staleTTL is the TTL of stale records, in seconds (RFC 8767, section 4).
const staleTTL = 30

// A Place says where the records of a reply go in a response: behind what the response has already.
type Place struct {
	// Start is where the response begins in its buffer. Owner is the offset from there of the name that the reply is
	// about: of the client's question, or of the target of the CNAME record before the place.
	Start, Owner int
	// Limit is how long the response may become, in bytes. Options is how many bytes come behind the records if all
	// of them fit.
	Limit, Options int
}

// An Age says how old a reply is, and which TTLs its records get. The zero Age changes no TTL: it is for a reply straight
// from the nameserver.
type Age struct {
	// Seconds is how long the reply was in the cache. The TTLs are lower by Seconds.
	Seconds uint32
	// Max bounds the TTLs in seconds, before Seconds is subtracted; 0 is no bound.
	Max uint32
	// Stale reports whether the reply has expired. Then every TTL is 30, or Max if that is less.
	Stale bool
}

// Append appends to dst the first n records of the reply, as far as they fit. It returns how many records of each
// section it has appended, and whether clients should ask again for records that are left out. It does not allocate
// if dst has room for Limit bytes.
//
// If not everything fits, the options are left out first, and then records; both count as left out (RFC 8914, section
// 3). If not all additional records fit, all of them are left out, because an RRset must not be sent in part. If
// nothing else is left out, clients should ask again only after a referral (RFC 2181, section 9).
func (r *Reply) Append(dst []byte, p Place, n int, age Age) (_ []byte, counts [wire.Sections]uint16, cut bool) {
	shift := len(dst) - p.Start - r.questionEnd
	n, cut = r.fit(n, p.Limit-shift, p.Options)
	dst = append(dst, r.msg[r.questionEnd:r.endOf(n)]...)
	if r.respell || shift != 0 || age != (Age{}) {
		m := mover{dst[p.Start:], r.questionEnd, r.questionEnd, p.Owner, shift}
		if whole := r.rewrite(&m, n, age); whole < n {
			n, cut = whole, true
			dst = dst[:p.Start+r.endOf(n)+shift]
		}
	}
	return dst, r.first(n), cut
}

// Target returns where the data of the i-th record will be in a response, as an offset from p.Start, if dst is what
// Append gets.
func (r *Reply) Target(i int, dst []byte, p Place) int {
	return int(r.records[i].fixed) + wire.FixedLen + len(dst) - p.Start - r.questionEnd
}

// Records returns the number of records in all sections.
func (r *Reply) Records() int { return len(r.records) }

// endOf returns where the first n records end.
func (r *Reply) endOf(n int) int {
	switch n {
	case len(r.records):
		return len(r.msg)
	case 0:
		return r.questionEnd
	}
	return r.end(r.records[n-1])
}

// first returns how many of the first n records each section has.
func (r *Reply) first(n int) (counts [wire.Sections]uint16) {
	for section, all := range r.counts {
		counts[section] = uint16(min(n, int(all))) //nolint:gosec // it has 16 bits
		n -= int(counts[section])
	}
	return counts
}

// fit returns how many of the first n records fit if the part of r.msg up to their end may have room bytes, with
// options bytes behind them.
func (r *Reply) fit(n, room, options int) (records int, cut bool) {
	if r.endOf(n)+options <= room {
		return n, false
	}
	for records < n && r.end(r.records[records]) <= room {
		records++
	}
	if before := len(r.records) - int(r.counts[wire.AdditionalSection]); records >= before && records < len(r.records) {
		return before, options > 0 || r.referral()
	}
	return records, true
}

// referral reports whether the reply refers a resolver to other nameservers. The resolver then needs their addresses,
// which are in the additional section (RFC 9471).
func (r *Reply) referral() bool {
	return r.Rcode() == dns.RcodeSuccess && r.Answers() == 0 &&
		r.HasType(wire.AuthoritySection, dns.TypeNS) && !r.HasType(wire.AuthoritySection, dns.TypeSOA)
}

// rewrite changes the first n records in the response of m. Owners that are the question's name get the spelling of the
// name at m.owner, and TTLs are set as age says. If m.shift is not 0, names are moved, too. If a name would point too far,
// rewrite ends before its record. It returns how many records are done.
func (r *Reply) rewrite(m *mover, n int, age Age) int {
	response, shift, at := m.response, m.shift, r.questionEnd+m.shift
	for i, rec := range r.records[:n] {
		fixed, end := int(rec.fixed)+shift, r.end(rec)+shift
		if rec.respell {
			m.respell(at)
		} else if shift != 0 && m.name(at, fixed) == 0 {
			return i
		}
		if shift != 0 && !m.data(r.typeOf(rec), fixed+wire.FixedLen, end) {
			return i
		}
		if age != (Age{}) {
			r.setTTL(response[fixed:end], i, age)
		}
		at = end
	}
	return n
}

// setTTL sets the TTL of the i-th record; record is what follows the owner. The TTL of the SOA record of a negative
// answer is at most the MINIMUM of this record. Otherwise clients would count the MINIMUM from the time at which they
// receive the record (RFC 2308, section 5).
func (r *Reply) setTTL(record []byte, i int, age Age) {
	ttl := age.bound(seconds(record[wire.TTLOffset:]))
	if r.negative && i >= r.Answers() && r.typeOf(r.records[i]) == dns.TypeSOA && len(record) >= wire.FixedLen+soaLen {
		minimum := record[len(record)-4:]
		binary.BigEndian.PutUint32(minimum, age.bound(seconds(minimum)))
		ttl = min(ttl, seconds(minimum))
	}
	if age.Stale {
		ttl = age.bound(staleTTL)
	} else {
		ttl -= min(ttl, age.Seconds)
	}
	binary.BigEndian.PutUint32(record[wire.TTLOffset:], ttl)
}

// Within returns a with Max at most ttl.
func (a Age) Within(ttl uint32) Age {
	a.Max = a.bound(ttl)
	return a
}

// bound returns ttl, but at most Max.
func (a Age) bound(ttl uint32) uint32 {
	if a.Max > 0 {
		return min(ttl, a.Max)
	}
	return ttl
}

// A mover changes names in a response, which are shift bytes further than in a reply.
type mover struct {
	response    []byte
	hole        int // names from here to questionEnd are not in the response
	questionEnd int // of the reply
	owner       int // where the question's name of the reply is in the response
	shift       int
}

// respell changes the name at offset at to the spelling of the name at m.owner. The two names must be equal except for
// the case of letters. respell changes the labels, and makes the pointer after them point to the name at m.owner. The
// name keeps its length.
func (m *mover) respell(at int) {
	for owner := m.owner; m.response[at] != 0; {
		if wire.IsPointer(m.response[at]) {
			binary.BigEndian.PutUint16(m.response[at:], wire.PointerBits|uint16(owner)) //nolint:gosec // within the question
			return
		}
		n := 1 + int(m.response[at])
		copy(m.response[at:at+n], m.response[owner:owner+n])
		at += n
		owner += n
	}
}

// name makes the pointer in the name at offset at point to the same name as in the reply. It returns where the name
// ends, at most limit. It returns 0 if the pointer would point too far, or to a name that is not in the response.
func (m *mover) name(at, limit int) (end int) {
	for at < limit && m.response[at] != 0 {
		if wire.IsPointer(m.response[at]) && at+2 <= limit {
			to := wire.PointerTarget(m.response, at)
			switch {
			case to >= m.questionEnd:
				to += m.shift
			case to >= m.hole:
				return 0
			default:
				to += m.owner - wire.HeaderLen
			}
			if to > wire.MaxPointer {
				return 0
			}
			binary.BigEndian.PutUint16(m.response[at:], wire.PointerBits|uint16(to)) //nolint:gosec // at most MaxPointer
			return at + 2
		}
		at += 1 + int(m.response[at])
	}
	return min(at+1, limit)
}

// data is like name for all names in the data of a record. It reports false if a pointer would point too far.
func (m *mover) data(rrtype uint16, at, end int) bool {
	skip, names := namesIn(rrtype, m.response[at:end])
	at += skip
	for ; names > 0 && at != 0; names-- {
		at = m.name(at, end)
	}
	return at != 0
}

// namesIn returns where names begin in the data of a record, and how many there are. It knows the types of which
// servers compress names: those of RFC 1035, and others that must not be compressed (RFC 3597, section 4) but are.
func namesIn(rrtype uint16, data []byte) (at, names int) {
	switch rrtype {
	case dns.TypeNS, dns.TypeMD, dns.TypeMF, dns.TypeCNAME, dns.TypeMB, dns.TypeMG, dns.TypeMR, dns.TypePTR, dns.TypeDNAME,
		dns.TypeNXT, dns.TypeNSEC, dns.TypeNSAPPTR:
		return 0, 1
	case dns.TypeSOA, dns.TypeMINFO, dns.TypeRP, dns.TypeTALINK:
		return 0, 2
	case dns.TypeMX, dns.TypeAFSDB, dns.TypeRT, dns.TypeKX, dns.TypeLP, dns.TypeSVCB, dns.TypeHTTPS:
		return 2, 1
	case dns.TypePX:
		return 2, 2
	case dns.TypeSRV:
		return 6, 1
	case dns.TypeSIG, dns.TypeRRSIG:
		return 18, 1
	case dns.TypeNAPTR:
		for at = 4; names < 3 && at < len(data); names++ {
			at += 1 + int(data[at])
		}
		return min(at, len(data)), 1
	}
	return 0, 0
}
