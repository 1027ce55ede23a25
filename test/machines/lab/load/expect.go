package load

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// An Expectation says what is asked, and which answers are right.
type Expectation struct {
	Questions []Question `json:"questions"`
	// Foreign are the networks of addresses that only nameservers answer with, where the
	// agent answers. Such an answer, if it is not right, counts as foreign instead of
	// wrong, and so does REFUSED.
	Foreign []netip.Prefix `json:"foreign,omitempty"`
}

// A Question is a question for A records with its right answer.
type Question struct {
	// Name is the name. For "*" as its first label, each query has another label instead, so that no cache has the answer.
	Name string `json:"name"`
	// Addresses are the addresses that the answer must have, in any order.
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// Addrs parses addresses. It panics if one is malformed.
func Addrs(texts ...string) []netip.Addr {
	addrs := make([]netip.Addr, len(texts))
	for i, text := range texts {
		addrs[i] = netip.MustParseAddr(text)
	}
	return addrs
}

// ask returns the name to ask, with a trailing dot. unique distinguishes queries.
func (q *Question) ask(unique uint64) string {
	if rest, star := strings.CutPrefix(q.Name, "*."); star {
		return fmt.Sprintf("q%x.%s", unique, dns.Fqdn(rest))
	}
	return dns.Fqdn(q.Name)
}

// verdict returns the kind of an answer to a question.
func (e *Expectation) verdict(q *Question, rcode int, addresses []netip.Addr) Kind {
	sorted := func(addrs []netip.Addr) []netip.Addr {
		return slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)
	}
	foreign := func(addr netip.Addr) bool {
		return slices.ContainsFunc(e.Foreign, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	switch {
	case rcode == dns.RcodeSuccess && slices.Equal(sorted(addresses), sorted(q.Addresses)):
		return Right
	case rcode == dns.RcodeRefused || slices.ContainsFunc(addresses, foreign):
		return Foreign
	case rcode == dns.RcodeServerFailure:
		return Failed
	}
	return Wrong
}
