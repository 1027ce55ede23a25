package main

import (
	"context"
	"time"

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
	for _, candidate := range config.NameList(name) {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			r.sent++
			resp, _, err := exchange(ctx, r.server, candidate, qtype)
			if err != nil {
				return nil, err
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

// exchange sends one query. It ends with ctx, also while it waits for the answer.
func exchange(ctx context.Context, server, name string, qtype uint16) (*dns.Msg, time.Duration, error) {
	client := dns.Client{Timeout: patience}
	conn, err := client.DialContext(ctx, server)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	return client.ExchangeWithConnContext(ctx, new(dns.Msg).SetQuestion(name, qtype), conn)
}
