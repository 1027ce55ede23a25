package fakedns

import (
	"fmt"
	"net"
	"strings"

	"github.com/miekg/dns"
)

// Answer is a Handler that knows the given records, in presentation form, and
// says NXDOMAIN to names without one and NODATA to types without one. It panics
// if a record cannot be parsed.
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

// newReply is an empty answer to a query.
func newReply(query *dns.Msg) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	return reply
}

// Rcode is a Handler that answers every query with a response code.
func Rcode(rcode int) Handler {
	return func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(query, rcode) }
}

// Silence is a Handler that never answers: a black hole that takes packets and
// connections.
func Silence(*dns.Msg, string) *dns.Msg { return nil }

// Size is a Handler whose answers are about n bytes long, the whole message: one
// TXT record for a question for TXT, as many addresses as go in for A and AAAA,
// NODATA for other types. It is never longer than n, unless n is too small for one
// record. The records have a TTL of 60.
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

// strs is n bytes of character-strings, their lengths included, at least one.
func strs(n int) []string {
	const longest = 255
	var all []string
	for ; n > longest+1; n -= longest + 1 {
		all = append(all, strings.Repeat("x", longest))
	}
	return append(all, strings.Repeat("x", max(n-1, 0)))
}

// Truncate is handler, but over UDP there is no more of a reply than the header,
// with TC set, and the question.
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
