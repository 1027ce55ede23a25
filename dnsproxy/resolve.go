package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Resolve returns the addresses that nameservers have for a hostname: of rrtype A or AAAA. The table
// is not asked, neither for the name nor for those that CNAME records lead to. The answer may come
// from the cache. Local-only names have none. The error says why there are none. After the end of ctx
// it returns at once.
func (s *Server) Resolve(ctx context.Context, hostname string, rrtype uint16) ([]netip.Addr, error) {
	type result struct {
		addrs []netip.Addr
		err   error
	}
	done := make(chan result, 1)
	go func() { // which ends within the time of a forwarded query
		addrs, err := s.resolve(hostname, rrtype)
		done <- result{addrs, err}
	}()
	select {
	case r := <-done:
		return r.addrs, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Server) resolve(hostname string, rrtype uint16) ([]netip.Addr, error) {
	name, err := wire.ParseHostname(hostname)
	if err != nil {
		return nil, err
	}
	if zone, local := s.handler.suffixes.Local(name); local {
		return nil, fmt.Errorf("names below %s are never forwarded (--local-only)", zone)
	}
	packet, err := new(dns.Msg).SetQuestion(name.String(), rrtype).Pack()
	if err != nil {
		return nil, err
	}
	var q wire.Query
	if !q.Parse(packet) {
		return nil, errQuestionName
	}
	forwarder := s.handler.forwarder
	ask := forward.Query{Name: name, Key: forwarder.Key(&q, false), Cacheable: true, Message: packet, How: upstream.UDPThenTCP}
	found, ok := forwarder.Lookup(&ask)
	switch {
	case !ok:
		answered := forwarder.Answer(&ask)
		found = &answered
	case ask.RefreshDue():
		forwarder.Refresh(&ask)
	}
	if found.Err != nil {
		return nil, found.Err
	}
	request := reply.Request{Query: packet, Limit: dns.MaxMsgSize}
	return addressesIn(found.Reply.Append(nil, &request, found.Age), rrtype)
}

// addressesIn returns the addresses in the answer section of a response.
func addressesIn(response []byte, rrtype uint16) ([]netip.Addr, error) {
	var message dns.Msg
	if err := message.Unpack(response); err != nil {
		return nil, fmt.Errorf("%w: %w", forward.ErrBadReply, err)
	}
	var addrs []netip.Addr
	for _, rr := range message.Answer {
		ip := netip.Addr{}
		switch rr := rr.(type) {
		case *dns.A:
			ip, _ = netip.AddrFromSlice(rr.A)
		case *dns.AAAA:
			ip, _ = netip.AddrFromSlice(rr.AAAA)
		}
		if ip = ip.Unmap(); ip.IsValid() && rr.Header().Rrtype == rrtype {
			addrs = append(addrs, ip)
		}
	}
	if len(addrs) > 0 {
		return addrs, nil
	}
	if message.Rcode != dns.RcodeSuccess {
		return nil, fmt.Errorf("nameservers answer %s", dns.RcodeToString[message.Rcode])
	}
	return nil, errors.New("the name has no " + dns.TypeToString[rrtype] + " records")
}
