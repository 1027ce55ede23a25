package dnsproxy

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/nat64"
)

// Resolve returns the addresses of hostname that nameservers or the cache have. rrtype is A or
// AAAA. Resolve does not use the table, neither for hostname nor for names that CNAME records lead to.
// Nameservers are asked for local-only names, too: only queries of clients for them are not forwarded. A guard does not judge
// hostname, but no CNAME record may lead to a name that a rule of deny names.
// Resolve returns at once when ctx ends.
//
// If onlyCached is true, Resolve does not ask nameservers. If the cache then has no answer, known is false, and addrs
// and err are nil. In all other cases known is true. If there are no addresses, err gives the reason.
func (s *Server) Resolve(
	ctx context.Context, hostname string, rrtype uint16, onlyCached bool,
) (addrs []netip.Addr, known bool, err error) {
	r, err := s.newResolution(hostname, rrtype)
	if err != nil {
		return nil, true, err
	}
	if found, ok := s.handler.forwarder.Lookup(&r.outgoing); ok {
		if r.outgoing.RefreshDue() {
			s.handler.forwarder.Refresh(&r.outgoing)
		}
		addrs, err = r.addresses(found)
		return addrs, true, err
	}
	if onlyCached {
		return nil, false, nil
	}
	s.handler.forwarder.Begin(&r.outgoing, r)
	select {
	case found := <-r.found:
		addrs, err = r.addresses(found)
		return addrs, true, err
	case <-ctx.Done():
		return nil, true, ctx.Err()
	}
}

// A resolution is a query of the agent itself.
type resolution struct {
	packet   []byte
	rrtype   uint16
	policy   *guard.Policy
	query    wire.Query
	outgoing forward.Query
	found    chan *forward.Result // receives the result; has a buffer of one
}

// Receive takes the result of the forwarder.
func (r *resolution) Receive(found *forward.Result) { r.found <- found }

func (s *Server) newResolution(hostname string, rrtype uint16) (*resolution, error) {
	name, err := wire.ParseHostname(hostname)
	if err != nil {
		return nil, err
	}
	r := &resolution{rrtype: rrtype, policy: s.config.Guard.Policy(), found: make(chan *forward.Result, 1)}
	r.packet = wire.NewQuery(wire.AppendQuestion(nil, name, rrtype, dns.ClassINET))
	if !r.query.Parse(r.packet) {
		return nil, errQuestionName
	}
	r.outgoing = forward.Query{
		Name: name, Key: forward.Key(&r.query), Cacheable: true, Message: r.packet, Mode: upstream.UDPThenTCP,
	}
	return r, nil
}

// addresses returns the addresses in a result of the forwarder.
func (r *resolution) addresses(found *forward.Result) (addrs []netip.Addr, err error) {
	if found.Err != nil {
		return nil, found.Err
	}
	for i := range found.Reply.Aliases() {
		target, ok := found.Reply.Alias(i, new([wire.MaxNameLen]byte))
		if ok && r.policy.Enforces() {
			if _, rule := r.policy.Judge(target, r.rrtype); rule != nil && rule.Denies {
				return nil, fmt.Errorf("a CNAME record leads to %s: %s", target, r.policy.Reason(guard.Denied, rule))
			}
		}
	}
	for data := range found.Reply.Data(r.rrtype) {
		if ip, ok := netip.AddrFromSlice(data); ok && len(data) == wire.AddressLen(r.rrtype) {
			addrs = append(addrs, ip.Unmap())
		}
	}
	switch rcode := found.Rcode(); {
	case len(addrs) > 0:
		return addrs, nil
	case rcode == dns.RcodeSuccess || rcode == dns.RcodeNameError:
		return nil, fmt.Errorf("nameservers answer %s: %w", wire.RcodeName(rcode), nat64.ErrNone)
	default:
		return nil, fmt.Errorf("nameservers answer %s", wire.RcodeName(rcode))
	}
}
