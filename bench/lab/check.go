package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/miekg/dns"
)

// samples is the number of answers of each kind that are checked.
const samples = 200

// A Checker sends queries to a server and compares the answers with the expected ones.
type Checker struct {
	Network string // "udp" or "tcp"
	Addr    netip.AddrPort
	// fixed, if valid, is what every answer should hold.
	fixed netip.Addr
}

// Check sends about 200 queries (the constant samples) of the mix m, spread over hosts. It returns an error for the
// first wrong answer.
func (c Checker) Check(ctx context.Context, m Mix, hosts []Host) error {
	step := max(len(hosts)/samples, 1)
	for i := 0; i < len(hosts); i += step {
		if err := c.Ask(ctx, m, hosts[i]); err != nil {
			return fmt.Errorf("checking %s answers over %s: %w", m.Name, c.Network, err)
		}
	}
	return nil
}

// Ask sends one query and compares.
func (c Checker) Ask(ctx context.Context, m Mix, h Host) error {
	name, qtype := m.question(h)
	query := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
	client := &dns.Client{Net: c.Network}
	reply, _, err := client.ExchangeContext(ctx, query, c.Addr.String())
	if err != nil {
		return fmt.Errorf("asking for %s: %w", name, err)
	}
	if c.fixed.IsValid() {
		h.ips = []netip.Addr{c.fixed}
	}
	if reply.Rcode != dns.RcodeSuccess {
		err = errors.New(dns.RcodeToString[reply.Rcode])
	} else {
		err = m.check(h, reply)
	}
	if err != nil {
		return fmt.Errorf("asking for %s %s: %w", name, dns.TypeToString[qtype], err)
	}
	return nil
}

// anything accepts every answer.
func anything(Host, *dns.Msg) error { return nil }
