package upstream

import (
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A server is said to refuse all queries after refusingAfter failures in a row, for names of refusingDomains
// different domains. If all failures are for names of one domain, the domain's own nameservers may be the reason.
const (
	refusingAfter   = 10
	refusingDomains = 3
)

// refusals counts the failures that a server has sent in a row, without an answer between them.
type refusals struct {
	count   int
	domains []wire.Name // the last two labels of each name that failed; at most refusingDomains
}

// all reports whether the server refuses all queries, as far as is known.
func (f *refusals) all() bool { return f.count >= refusingAfter && len(f.domains) == refusingDomains }

// add counts a failure for a question in wire form.
func (f *refusals) add(question []byte) {
	f.count++
	if len(f.domains) == refusingDomains || len(question) < questionTail {
		return
	}
	domain := wire.Fold(question[:len(question)-questionTail])
	for domain != wire.Root && domain.Parent() != wire.Root && domain.Parent().Parent() != wire.Root {
		domain = domain.Parent()
	}
	if !slices.Contains(f.domains, domain) {
		f.domains = append(f.domains, domain)
	}
}

// questionTail is the length of what follows the name's labels in a question: the root label, the type and the class.
const questionTail = 5

// rcodeKey returns the key of a response code in Status.Responses.
func rcodeKey(code int) string {
	switch code {
	case dns.RcodeSuccess, dns.RcodeNameError, dns.RcodeServerFailure, dns.RcodeRefused:
		return wire.RcodeName(code)
	}
	return "other"
}
