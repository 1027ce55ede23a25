package dnsproxy

import (
	"encoding/binary"
	"strings"

	"github.com/miekg/dns"
)

// An answerer makes the responses that nametap gives in its own name. It holds
// no state.
type answerer struct {
	ttl         uint32 // seconds, for every record that we make
	ednsUDPSize uint16 // bytes, the most that a UDP response may have
	cluster     cluster
	soaData     []byte // of negative answers, in wire form
}

// reply returns an empty response to req: the header bits that RFC 1035 has
// copied, and an OPT record if the request had one (RFC 6891, section 6.1.1).
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

// maxReason bounds the text of an Extended DNS Error in bytes, so that with the
// longest question it still fits 512 bytes.
const maxReason = 200

// failure returns a response without records that says why it has none: an
// Extended DNS Error (RFC 8914), for clients that understand EDNS.
func (a *answerer) failure(req *dns.Msg, rcode int, code uint16, text string) *dns.Msg {
	resp := a.reply(req, rcode)
	if opt := resp.IsEdns0(); opt != nil {
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: text[:min(len(text), maxReason)]})
	}
	return resp
}

// chaos answers the two names of class CH that servers are asked who they are
// by (RFC 4892), and refuses the others.
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
		return a.failure(req, dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, errOtherClass.Error())
	}
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	hdr := dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassCHAOS}
	resp.Answer = []dns.RR{&dns.TXT{Hdr: hdr, Txt: []string{text}}}
	return resp
}

// The names of SOA records, below the cluster's domain.
const (
	soaServer  wireName = "\x02ns\x03dns"
	soaMailbox wireName = "\x0ahostmaster"
)

// newSOAData returns the data of the SOA record that negative answers have, in wire
// form. Its names are of the cluster's domain for want of better ones.
func newSOAData(domain wireName, ttl uint32) []byte {
	data := append(append([]byte(soaServer), domain...), 0)
	data = append(append(append(data, soaMailbox...), domain...), 0)
	// No secondary reads the first four; the values are what RFC 1912 calls usual.
	const serial, refresh, retry, expire = 1, 7200, 1800, 86400
	for _, n := range []uint32{serial, refresh, retry, expire, ttl} {
		data = binary.BigEndian.AppendUint32(data, n)
	}
	return data
}

// fit makes resp fit the client's transport: over UDP what does not fit is cut
// at a record's boundary with TC=1, so that the client asks again over TCP.
func (a *answerer) fit(resp, req *dns.Msg, over transport) {
	var offered uint16
	if opt := req.IsEdns0(); opt != nil {
		offered = opt.UDPSize()
	}
	size := a.limit(offered, over)
	resp.Truncate(size)
	if resp.IsTsig() != nil && resp.Len() > size { // Truncate leaves signed messages alone
		resp.Answer, resp.Ns, resp.Truncated = nil, nil, true
	}
}
