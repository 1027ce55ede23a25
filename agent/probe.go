package agent

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
)

// probeTimeout is how long a listener has to answer a probe.
const probeTimeout = time.Second

// probe returns an error unless all listeners answer. They are asked for what needs no
// table and no nameserver (RFC 4892).
func probe(ctx context.Context, listeners []dnsproxy.Addr) error {
	for _, l := range listeners {
		query := new(dns.Msg).SetQuestion("id.server.", dns.TypeTXT)
		query.Question[0].Qclass = dns.ClassCHAOS
		client := dns.Client{Net: l.Network, Timeout: probeTimeout}
		if _, _, err := client.ExchangeContext(ctx, query, reachable(l.Address)); err != nil {
			return fmt.Errorf("asking our own listener %s: %w", l, err)
		}
	}
	return nil
}

// reachable returns the address at which a listener is asked that is open on an
// address: one that is open on all of them, on loopback.
func reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip.To4() == nil {
			host = "::1"
		}
	}
	return net.JoinHostPort(host, port)
}
