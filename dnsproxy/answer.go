package dnsproxy

import (
	"encoding/binary"
	"errors"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// An answerer makes the responses that do not come from a nameserver. It is immutable.
type answerer struct {
	ttl         uint32 // of every record, in seconds
	ednsUDPSize uint16 // length of the longest UDP response, in bytes
	cluster     table.Cluster
	soaData     []byte // data of the SOA record of negative answers, in wire form
}

// reply returns a response to req without records, except an OPT record if req has one
// (RFC 6891, section 6.1.1).
func (a *answerer) reply(req *dns.Msg, rcode int) *dns.Msg {
	resp := new(dns.Msg).SetRcode(req, rcode)
	resp.RecursionAvailable = true
	resp.CheckingDisabled = req.CheckingDisabled
	resp.Compress = true
	if opt := req.IsEdns0(); opt != nil {
		resp.SetEdns0(a.ednsUDPSize, opt.Do())
	}
	return resp
}

// A failure says why a response has no records.
type failure struct {
	rcode int
	code  uint16 // of the Extended DNS Error (RFC 8914)
	err   error  // its text; nil for none
}

// failureOf returns the failure for an error of forwarding.
func failureOf(err error) failure {
	f := failure{rcode: dns.RcodeServerFailure, code: dns.ExtendedErrorCodeNoReachableAuthority, err: err}
	var cached forward.CachedFailure
	switch {
	case errors.As(err, &cached):
		f.code = dns.ExtendedErrorCodeCachedError
	case errors.Is(err, forward.ErrEcho):
		// Refused, since a forwarder that gets no answer asks again.
		f.rcode, f.code = dns.RcodeRefused, dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrTooMany), errors.Is(err, errOrigin):
		f.code = dns.ExtendedErrorCodeOther
	case errors.Is(err, forward.ErrBadReply), errors.Is(err, upstream.ErrMalformed):
		f.code = dns.ExtendedErrorCodeInvalidData
	}
	return f
}

// maxReason bounds the text of an Extended DNS Error in bytes, so that a response with the
// longest question fits in 512 bytes.
const maxReason = 200

// text returns the text of the Extended DNS Error.
func (f failure) text() string {
	text := f.err.Error()
	return text[:min(len(text), maxReason)]
}

// failure returns a response without records. For clients with EDNS it has an Extended DNS
// Error that says why.
func (a *answerer) failure(req *dns.Msg, why failure) *dns.Msg {
	resp := a.reply(req, why.rcode)
	if opt := resp.IsEdns0(); opt != nil && why.err != nil {
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: why.code, ExtraText: why.text()})
	}
	return resp
}

// respondFailure appends the response to q for a failure to dst.
func (a *answerer) respondFailure(dst []byte, q *wire.Query, why failure) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst)}
	w.failure(why)
	return w.buf
}

// respondTooMany appends the response to a query that is refused because too many are in
// flight, and counts it.
func (h *handler) respondTooMany(dst []byte, t *task) ([]byte, outcome) {
	h.forwarder.Overflow()
	why := failureOf(forward.ErrTooMany)
	return h.respondFailure(dst, &t.query, why), outcome{why.rcode, sourceSelf}
}

// respondUnknown appends the response for a local-only name that is not in the table.
func (h *handler) respondUnknown(dst []byte, t *task) ([]byte, outcome) {
	n := negative{dns.RcodeNameError, t.decision.zone}
	if t.decision.exists(t.query.Name) {
		n.rcode = dns.RcodeSuccess
	}
	return h.respondNegative(dst, &t.query, n, h.limit(t.query.UDPSize, t.from.over)), outcome{n.rcode, sourceSelf}
}

// respondResult appends the response that the forwarder has found.
func (h *handler) respondResult(dst []byte, t *task, found *forward.Result) ([]byte, outcome) {
	q, d, limit := &t.query, &t.decision, h.limit(t.query.UDPSize, t.from.over)
	switch {
	case errors.Is(found.Err, forward.ErrAbsent):
		return h.respondUnknown(dst, t)
	case found.Err != nil:
		why := failureOf(found.Err)
		return h.respondFailure(dst, q, why), outcome{why.rcode, found.Source}
	case d.action == actExists && found.Rcode() == dns.RcodeNameError:
		// The name exists, but has no records of this type anywhere: NODATA.
		return h.respondMesh(dst, q, d, limit), outcome{dns.RcodeSuccess, sourceTable}
	case found.Relayed != nil:
		// Of the slow path alone, which has no dst.
		response := reply.Cut(reply.Hop(found.Relayed, q.EDNS, h.ednsUDPSize), limit)
		return response, outcome{reply.Rcode(response), found.Source}
	}
	request := reply.Request{
		Query: q.Packet[:q.QuestionEnd], EDNS: q.EDNS, DO: q.DO,
		UDPSize: h.ednsUDPSize, KeepAD: h.forwarder.TrustAD(), Limit: limit,
	}
	return found.Reply.Append(dst, &request, found.Age), outcome{found.Rcode(), found.Source}
}

// respondMesh appends the response to a query for a mesh name, of at most limit bytes.
func (a *answerer) respondMesh(dst []byte, q *wire.Query, d *decision, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit, zone: d.zone}
	if d.action == actPointers {
		w.pointers(d.match.Pointers)
	} else {
		w.addresses(&d.match)
	}
	return w.buf
}

// respondSpecial appends the response for a name in a special-use zone, of at most limit
// bytes, to dst.
func (a *answerer) respondSpecial(dst []byte, q *wire.Query, zone wire.Name, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit}
	w.special(zone)
	return w.buf
}

// A negative is a negative answer: NXDOMAIN or NODATA (NOERROR), and the zone of its SOA
// record, which is the question's name or a suffix of it.
type negative struct {
	rcode int
	zone  wire.Name
}

// respondNegative appends a response without answers, of at most limit bytes, to dst. A query
// for the zone's SOA record gets that record as its answer.
func (a *answerer) respondNegative(dst []byte, q *wire.Query, n negative, limit int) []byte {
	w := writer{answerer: a, query: q, buf: dst, start: len(dst), limit: limit}
	w.negative(n)
	return w.buf
}

// chaos answers queries of class CH for the server's version and identity (RFC 4892), and
// refuses all others.
func (a *answerer) chaos(req *dns.Msg, version, id string) *dns.Msg {
	q := req.Question[0]
	text := ""
	switch strings.ToLower(q.Name) {
	case "version.bind.", "version.server.":
		text = version
	case "id.server.", "hostname.bind.":
		text = id
	}
	if text == "" || q.Qtype != dns.TypeTXT && q.Qtype != dns.TypeANY {
		return a.failure(req, failure{dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, errOtherClass})
	}
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	hdr := dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassCHAOS}
	resp.Answer = []dns.RR{&dns.TXT{Hdr: hdr, Txt: []string{text}}}
	return resp
}

// The names in SOA records, followed there by the cluster domain.
const (
	soaServer  wire.Name = "\x02ns\x03dns"
	soaMailbox wire.Name = "\x0ahostmaster"
)

// newSOAData returns the data of the SOA record of negative answers, in wire form. Its names
// are in the cluster domain, which need not be the zone: no client looks at them.
func newSOAData(domain wire.Name, ttl uint32) []byte {
	data := append(append([]byte(soaServer), domain...), 0)
	data = append(append(append(data, soaMailbox...), domain...), 0)
	// The first four are for secondary servers, which nametap does not have; the values
	// are those that RFC 1912 recommends.
	const serial, refresh, retry, expire = 1, 7200, 1800, 86400
	for _, n := range []uint32{serial, refresh, retry, expire, ttl} {
		data = binary.BigEndian.AppendUint32(data, n)
	}
	return data
}

// limit returns how long a response may be in bytes: over UDP what the client offers (RFC
// 6891, section 6.2.3), up to ednsUDPSize. An offer of 0 is none.
func (a *answerer) limit(offered uint16, over transport) int {
	if over == overTCP {
		return dns.MaxMsgSize
	}
	return int(max(dns.MinMsgSize, min(offered, a.ednsUDPSize)))
}
