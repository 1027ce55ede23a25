package main

import (
	"context"
	"fmt"
	"time"

	"github.com/miekg/dns"
)

// A stubResolver resolves names like glibc's getaddrinfo: it walks the search list, queries A
// and AAAA of each name, and stops at the first name that has an address. Like glibc by
// default, it does not use EDNS.
type stubResolver struct {
	server string // host:port
	search []string
	ndots  int
	sent   int // queries so far
}

// queryTimeout is how long an answer may take before the demo fails.
const queryTimeout = 5 * time.Minute

// getaddrinfo returns the addresses of name. It returns no error if there are none.
func (r *stubResolver) getaddrinfo(ctx context.Context, name string) ([]string, error) {
	config := dns.ClientConfig{Search: r.search, Ndots: r.ndots}
	for _, candidate := range config.NameList(name) {
		var addrs []string
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			found, err := r.lookup(ctx, candidate, qtype)
			if err != nil {
				return nil, err
			}
			addrs = append(addrs, found...)
		}
		if len(addrs) > 0 {
			return addrs, nil
		}
	}
	return nil, nil
}

// lookup sends one query and returns the addresses in the answer.
func (r *stubResolver) lookup(ctx context.Context, name string, qtype uint16) ([]string, error) {
	r.sent++
	client := dns.Client{Timeout: queryTimeout}
	resp, _, err := client.ExchangeContext(ctx, new(dns.Msg).SetQuestion(name, qtype), r.server)
	if err != nil {
		return nil, fmt.Errorf("querying %s for %s: %w", r.server, name, err)
	}
	var addrs []string
	for _, rr := range resp.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			addrs = append(addrs, rr.A.String())
		case *dns.AAAA:
			addrs = append(addrs, rr.AAAA.String())
		}
	}
	return addrs, nil
}
