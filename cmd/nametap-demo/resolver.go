package main

import (
	"context"
	"fmt"

	"github.com/miekg/dns"
)

// A stubResolver resolves names like glibc's getaddrinfo: it walks the search list, queries A
// and AAAA of each name, and stops at the first name that has an address. Like glibc by
// default, it does not use EDNS.
type stubResolver struct {
	server string // host:port
	sent   int    // queries so far
}

// getaddrinfo returns the addresses of name. It returns no error if there are none.
func (r *stubResolver) getaddrinfo(ctx context.Context, name string) (addrs []string, err error) {
	config := dns.ClientConfig{Search: searchList(), Ndots: demoNdots}
	client := dns.Client{Timeout: patience}
	for _, candidate := range config.NameList(name) {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			r.sent++
			resp, _, err := client.ExchangeContext(ctx, new(dns.Msg).SetQuestion(candidate, qtype), r.server)
			if err != nil {
				return nil, fmt.Errorf("querying %s for %s: %w", r.server, candidate, err)
			}
			for _, rr := range resp.Answer {
				if rr.Header().Rrtype == qtype {
					addrs = append(addrs, dns.Field(rr, 1))
				}
			}
		}
		if len(addrs) > 0 {
			break
		}
	}
	return addrs, nil
}
