package fakedns

import (
	"fmt"
	"net"
	"strings"

	"github.com/miekg/dns"
)

// Answer returns a Handler with the given records, in presentation format. It answers names
// without records with NXDOMAIN, and types without records with NODATA. It panics if a
// record cannot be parsed.
func Answer(records ...string) Handler {
	byName := map[string][]dns.RR{}
	for _, record := range records {
		rr, err := dns.NewRR(record)
		if err != nil {
			panic(fmt.Sprintf("fakedns: record %q: %v", record, err))
		}
		name := strings.ToLower(rr.Header().Name)
		byName[name] = append(byName[name], rr)
	}
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := newReply(query)
		if len(query.Question) != 1 {
			reply.Rcode = dns.RcodeFormatError
			return reply
		}
		rrs, known := byName[strings.ToLower(query.Question[0].Name)]
		if !known {
			reply.Rcode = dns.RcodeNameError
		}
		for _, rr := range rrs {
			if rr.Header().Rrtype == query.Question[0].Qtype {
				reply.Answer = append(reply.Answer, rr)
			}
		}
		return reply
	}
}

// newReply returns an empty answer to a query.
func newReply(query *dns.Msg) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	return reply
}

// Rcode returns a Handler that answers every query with a response code.
func Rcode(rcode int) Handler {
	return func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(query, rcode) }
}

// Failure returns a Handler that answers every query with SERVFAIL and an Extended DNS Error.
func Failure(code uint16, text string) Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetRcode(query, dns.RcodeServerFailure).SetEdns0(dns.DefaultMsgSize, false)
		reply.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: code, ExtraText: text}}
		return reply
	}
}

// Silence is a Handler that never answers. The server still accepts packets and
// connections.
func Silence(*dns.Msg, string) *dns.Msg { return nil }

// Size returns a Handler whose answers, as whole messages, are about n bytes long: one TXT
// record for TXT, as many addresses as fit for A and AAAA, NODATA for other types. An
// answer is longer than n only if n is too small for one record. The records have a TTL of
// 60 s.
func Size(n int) Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := newReply(query)
		reply.Compress = true
		if len(query.Question) != 1 {
			return reply
		}
		question := query.Question[0]
		header := dns.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: dns.ClassINET, Ttl: 60}
		const owner = 2 + 10 // a pointer to the question's name, then type, class, TTL and length
		room := n - reply.Len()
		switch question.Qtype {
		case dns.TypeTXT:
			reply.Answer = []dns.RR{&dns.TXT{Hdr: header, Txt: strs(room - owner)}}
		case dns.TypeA:
			for i := range max(room/(owner+net.IPv4len), 1) {
				reply.Answer = append(reply.Answer, &dns.A{Hdr: header, A: net.IPv4(10, byte(i>>16), byte(i>>8), byte(i))})
			}
		case dns.TypeAAAA:
			for i := range max(room/(owner+net.IPv6len), 1) {
				ip := net.IP{0xfd, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}
				reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: header, AAAA: ip})
			}
		}
		return reply
	}
}

// strs returns n bytes of character-strings including their lengths, at least one.
func strs(n int) []string {
	const longest = 255
	var all []string
	for ; n > longest+1; n -= longest + 1 {
		all = append(all, strings.Repeat("x", longest))
	}
	return append(all, strings.Repeat("x", max(n-1, 0)))
}

// Truncate returns a Handler like handler, but over UDP a reply has only the header, with
// TC set, and the question.
func Truncate(handler Handler) Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		reply := handler(query, network)
		if reply == nil || network != "udp" {
			return reply
		}
		cut := newReply(query)
		cut.Truncated, cut.Rcode = true, reply.Rcode
		return cut
	}
}
