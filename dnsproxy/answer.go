package dnsproxy

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// An answerer makes the responses that nametap gives in its own name. It holds
// no state.
type answerer struct {
	ttl         uint32 // seconds, for every record that we make
	ednsUDPSize uint16 // bytes, the most that a UDP response may have
	cluster     cluster
}

// reply returns an empty response to req: the header bits that RFC 1035 has
// copied, and an OPT record if the request had one (RFC 6891, section 6.1.1).
func (a answerer) reply(req *dns.Msg, rcode int) *dns.Msg {
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
func (a answerer) failure(req *dns.Msg, rcode int, code uint16, text string) *dns.Msg {
	resp := a.reply(req, rcode)
	if opt := resp.IsEdns0(); opt != nil {
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: text[:min(len(text), maxReason)]})
	}
	return resp
}

// addresses answers an own name with its addresses of the types asked for. With
// none of them the answer is NODATA: no record but the CNAME of an autopath
// name, and the SOA by which it may be cached (RFC 2308).
func (a answerer) addresses(req *dns.Msg, m match) *dns.Msg {
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	owner := req.Question[0].Name
	if m.rule == RuleAutopath {
		target := targetName(owner, m.searched)
		resp.Answer = append(resp.Answer, &dns.CNAME{Hdr: a.header(owner, dns.TypeCNAME), Target: target})
		owner = target
	}
	named := len(resp.Answer)
	switch req.Question[0].Qtype {
	case dns.TypeA:
		resp.Answer = a.appendAddresses(resp.Answer, owner, m.host.v4)
	case dns.TypeAAAA:
		resp.Answer = a.appendAddresses(resp.Answer, owner, m.host.v6)
	case dns.TypeANY:
		resp.Answer = a.appendAddresses(resp.Answer, owner, m.host.v4)
		resp.Answer = a.appendAddresses(resp.Answer, owner, m.host.v6)
	}
	if len(resp.Answer) == named {
		resp.Ns = []dns.RR{a.soa(owner)}
	}
	return resp
}

// noData answers that name exists without a record of the type asked for.
func (a answerer) noData(req *dns.Msg, name string) *dns.Msg {
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	resp.Ns = []dns.RR{a.soa(name)}
	return resp
}

// pointers answers a PTR question with the FQDNs that share the address.
func (a answerer) pointers(req *dns.Msg, names []wireName) *dns.Msg {
	q := req.Question[0]
	if q.Qtype != dns.TypePTR && q.Qtype != dns.TypeANY {
		return a.noData(req, q.Name)
	}
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	for _, name := range names {
		resp.Answer = append(resp.Answer, &dns.PTR{Hdr: a.header(q.Name, dns.TypePTR), Ptr: name.String()})
	}
	return resp
}

// chaos answers the two names of class CH that servers are asked who they are
// by (RFC 4892), and refuses the others.
func (a answerer) chaos(req *dns.Msg, version, id string) *dns.Msg {
	q := req.Question[0]
	text := ""
	switch strings.ToLower(q.Name) {
	case "version.bind.", "version.server.":
		text = version
	case "id.server.", "hostname.bind.":
		text = id
	}
	if text == "" || q.Qtype != dns.TypeTXT && q.Qtype != dns.TypeANY {
		return a.failure(req, dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, "nametap serves class IN")
	}
	resp := a.reply(req, dns.RcodeSuccess)
	resp.Authoritative = true
	hdr := dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassCHAOS}
	resp.Answer = []dns.RR{&dns.TXT{Hdr: hdr, Txt: []string{text}}}
	return resp
}

// appendAddresses appends a record for every address, in a fresh random order,
// so that clients that take the first spread over all.
func (a answerer) appendAddresses(rrs []dns.RR, owner string, addrs []netip.Addr) []dns.RR {
	first := len(rrs)
	for _, addr := range addrs {
		if addr.Is4() {
			rrs = append(rrs, &dns.A{Hdr: a.header(owner, dns.TypeA), A: addr.AsSlice()})
		} else {
			rrs = append(rrs, &dns.AAAA{Hdr: a.header(owner, dns.TypeAAAA), AAAA: addr.AsSlice()})
		}
	}
	shuffled := rrs[first:]
	rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	return rrs
}

// soa makes the record that lets a resolver cache a negative answer. Every own
// name is the apex of a zone of its own, since we know nothing of its parents.
func (a answerer) soa(zone string) *dns.SOA {
	domain := a.cluster.domain.String()
	return &dns.SOA{
		Hdr: a.header(zone, dns.TypeSOA),
		Ns:  "ns.dns." + domain, Mbox: "hostmaster." + domain,
		// No secondary reads these; the values are what RFC 1912 calls usual.
		Serial: 1, Refresh: 7200, Retry: 1800, Expire: 86400,
		Minttl: a.ttl,
	}
}

func (a answerer) header(name string, rrtype uint16) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: a.ttl}
}

// fit makes resp fit the client's transport: over UDP what does not fit is cut
// at a record's boundary with TC=1, so that the client asks again over TCP.
func (a answerer) fit(resp, req *dns.Msg, udp bool) {
	size := dns.MaxMsgSize
	if udp {
		size = dns.MinMsgSize
		if opt := req.IsEdns0(); opt != nil {
			size = int(max(dns.MinMsgSize, min(opt.UDPSize(), a.ednsUDPSize)))
		}
	}
	resp.Truncate(size)
	if resp.IsTsig() != nil && resp.Len() > size { // Truncate leaves signed messages alone
		resp.Answer, resp.Ns, resp.Truncated = nil, nil, true
	}
}

// targetName returns the name that the client had before it appended the search
// domain, in the client's case.
func targetName(question string, searched wireName) string {
	wire, err := packName(question)
	if err != nil {
		return question // not reached: the question came from a packet
	}
	return presentation(string(slices.Concat(wire[:len(wire)-len(searched)], []byte(rootName))))
}
