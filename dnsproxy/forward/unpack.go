package forward

import (
	"encoding/binary"
	"encoding/hex"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// compressing lists the types whose data may have compressed names: the types of RFC 1035, and the
// types that RFC 3597, section 4, adds.
var compressing = [...]uint16{ //nolint:gochecknoglobals // a constant
	dns.TypeNS, dns.TypeMD, dns.TypeMF, dns.TypeCNAME, dns.TypeSOA, dns.TypeMB, dns.TypeMG, dns.TypeMR, dns.TypePTR,
	dns.TypeMINFO, dns.TypeMX, dns.TypeRP, dns.TypeAFSDB, dns.TypeRT, dns.TypeSIG, dns.TypePX, dns.TypeNXT, dns.TypeNAPTR,
	dns.TypeSRV,
}

// Derive returns a result with another reply, which edit makes of r's, with the TTLs that are left.
// r has what was found for name and the other fields of the question of key. Its Relayed and Err
// are nil. edit gets as much of r's reply as fits in limit bytes, so that the cost follows from the
// response.
func (r *Result) Derive(name wire.Name, key cache.Key, limit int, edit func(*dns.Msg)) (Result, error) {
	msg, err := r.message(name, key, limit)
	if err != nil {
		return Result{}, err
	}
	edit(msg)
	msg.Compress = true
	if truncated := msg.Truncated; msg.Len() > dns.MaxMsgSize {
		msg.Truncate(dns.MaxMsgSize)
		msg.Truncated = truncated // over TCP a client could do nothing about it
	}
	packed, err := msg.Pack()
	if err != nil {
		return Result{}, err
	}
	derived := *r
	if derived.Reply, err = reply.Parse(packed); err != nil {
		return Result{}, err
	}
	derived.Age.Cached, derived.Age.Seconds = r.Age.Stale, 0
	return derived, nil
}

// message returns what was found for name and the question of key as a message. A second
// that has begun counts as a whole one in TTLs.
func (r *Result) message(name wire.Name, key cache.Key, limit int) (*dns.Msg, error) {
	query := wire.AppendQuestion(make([]byte, wire.HeaderLen), name, key.Type, key.Class)
	age := r.Age
	if age.Cached {
		age.Seconds++
	}
	packed := r.Reply.Append(nil, &reply.Request{Query: query, Limit: limit}, age)
	return unpack(packed)
}

// unpack unpacks a message that is well-formed but for the data of its records. Data in which no name can
// be compressed is taken as it is.
func unpack(packed []byte) (*dns.Msg, error) {
	questionEnd, err := wire.WalkQuestions(packed)
	if err != nil {
		return nil, err
	}
	header := slices.Clone(packed[:questionEnd])
	wire.PutCounts(header, &[wire.Sections]uint16{uint16(wire.Count(packed, 0))}) //nolint:gosec // it is one
	msg := new(dns.Msg)
	if err := msg.Unpack(header); err != nil {
		return nil, err
	}
	sections := map[int]*[]dns.RR{wire.AnswerSection: &msg.Answer, wire.AuthoritySection: &msg.Ns, wire.AdditionalSection: &msg.Extra}
	w := wire.Walk(packed, questionEnd)
	for w.Next() {
		rr, err := unpackRecord(packed, &w)
		if err != nil {
			return nil, err
		}
		*sections[w.Section] = append(*sections[w.Section], rr)
	}
	return msg, w.Err
}

func unpackRecord(packed []byte, w *wire.Walker) (dns.RR, error) {
	if w.Type() == dns.TypeOPT || slices.Contains(compressing[:], w.Type()) {
		rr, _, err := dns.UnpackRR(packed, w.Owner)
		return rr, err
	}
	owner, _, err := dns.UnpackDomainName(packed, w.Owner)
	fixed := packed[w.Fixed:]
	return &dns.RFC3597{
		Hdr: dns.RR_Header{
			Name: owner, Rrtype: w.Type(), Class: binary.BigEndian.Uint16(fixed[2:]), Ttl: binary.BigEndian.Uint32(fixed[4:]),
		},
		Rdata: hex.EncodeToString(packed[w.Fixed+wire.FixedLen : w.End]),
	}, err
}
