package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/miekg/dns"
)

// samples is the number of answers of each kind that are checked.
const samples = 200

// A checker sends queries to a server and compares the answers with the expected ones.
type checker struct {
	network string // "udp" or "tcp"
	addr    netip.AddrPort
	// fixed, if valid, is what every answer should hold.
	fixed netip.Addr
}

// check sends samples queries of m, spread over hosts, and returns an error for the first
// wrong answer.
func (c checker) check(ctx context.Context, m mix, hosts []host) error {
	step := max(len(hosts)/samples, 1)
	for i := 0; i < len(hosts); i += step {
		if err := c.ask(ctx, m, hosts[i]); err != nil {
			return fmt.Errorf("checking %s answers over %s: %w", m.name, c.network, err)
		}
	}
	return nil
}

// ask sends one query and compares.
func (c checker) ask(ctx context.Context, m mix, h host) error {
	name, qtype := m.question(h)
	query := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
	client := &dns.Client{Net: c.network}
	reply, _, err := client.ExchangeContext(ctx, query, c.addr.String())
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
func anything(host, *dns.Msg) error { return nil }
