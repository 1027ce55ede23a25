package dnsproxy_test

import (
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// withSOA adds an SOA record with a TTL in seconds to a handler's negative answers, so that
// they are cached.
func withSOA(tb testing.TB, ttl string, handler fakedns.Handler) fakedns.Handler {
	tb.Helper()
	soa, err := dns.NewRR("example. " + ttl + " IN SOA ns.example. h.example. 1 2 3 4 " + ttl)
	if err != nil {
		tb.Fatal(err)
	}
	return func(query *dns.Msg, network string) *dns.Msg {
		reply := handler(query, network)
		if reply != nil && len(reply.Answer) == 0 && reply.Rcode != dns.RcodeServerFailure {
			reply.Ns = []dns.RR{soa}
		}
		return reply
	}
}

// except answers the names below a suffix with another handler.
func except(suffix string, special, others fakedns.Handler) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		if dns.IsSubDomain(suffix, strings.ToLower(query.Question[0].Name)) {
			return special(query, network)
		}
		return others(query, network)
	}
}
