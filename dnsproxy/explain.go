package dnsproxy

import (
	"errors"
	"fmt"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// An Explanation says how a question is answered and by which rule.
type Explanation struct {
	// Name and Type are the question.
	Name string `json:"name"`
	Type string `json:"type"`
	// Rows are the rows of the behaviour reference that apply: first those by
	// which the name is ours or not, then the one for its type.
	Rows []string `json:"rows"`
	// Rule is how the name was found in the table.
	Rule table.Rule `json:"rule"`
	// Host is the key of the table that answers, if one does.
	Host string `json:"host,omitempty"`
	// Source is where the answer comes from: table, upstream or self.
	Source string `json:"source"`
	// Why says it in words.
	Why string `json:"why"`
}

// Explain says how a question is answered and why so, without asking anybody. It
// fails if name cannot be a domain name or qtype is no type.
func (s *Server) Explain(name, qtype string) (Explanation, error) {
	code, known := dns.StringToType[strings.ToUpper(qtype)]
	if !known {
		return Explanation{}, fmt.Errorf("type %q: want a record type such as A, AAAA or PTR", qtype)
	}
	packed, err := wire.PackName(name)
	if err != nil {
		return Explanation{}, fmt.Errorf("name %q: want a domain name: %w", name, err)
	}
	q := wire.Question{Name: wire.Fold(packed), Type: code, Class: dns.ClassINET}
	current := s.handler.table.Load()
	d := s.handler.decide(q, current, new(table.Scratch))
	e := Explanation{
		Name: dns.Fqdn(name), Type: dns.TypeToString[code],
		Rows: d.rows(q), Rule: d.match.Rule, Source: d.source(),
	}
	if e.Rule == "" {
		e.Rule = table.RuleNone
	}
	if d.match.Host.Name != wire.Root {
		e.Host = d.match.Host.Key(&current.Cluster)
	}
	e.Why = why(d, e.Host)
	if d.exists(q.Name) {
		e.Why = fmt.Sprintf("an ancestor of names of the table, and names below %s are not forwarded: it has no records", d.zone)
	}
	return e, nil
}

// why puts a decision into words; key is that of the host, if there is one.
func why(d decision, key string) string {
	switch d.action {
	case actHold:
		return fmt.Sprintf("no table yet: held for up to %s", holdTimeout)
	case actPointers:
		return "an address of the table"
	case actAddresses:
		return "the mesh's own: " + whyName(d.match.Rule, d.match, key)
	case actExists:
		return "the mesh's own: " + whyName(d.match.Rule, d.match, key) + "; records other than addresses come from upstream"
	case actForward:
		switch {
		case errors.Is(d.reason, errNotSynced):
			return "no table yet, and not below the cluster domain: forwarded"
		case d.reason != nil:
			return d.reason.Error() + ": forwarded"
		}
		return "in no table: forwarded"
	case actUnknown:
		return fmt.Sprintf("in no table, and names below %s are not forwarded: it does not exist", d.zone)
	case actReject, actChaos, actSpecial:
	}
	if d.reason != nil {
		return d.reason.Error()
	}
	return ""
}

func whyName(rule table.Rule, m table.Match, key string) string {
	switch rule {
	case table.RuleExact:
		return "the host's full name"
	case table.RuleWildcard:
		return "below the wildcard " + key
	case table.RuleShortName:
		return "a short name of " + key
	case table.RuleAutopath:
		return fmt.Sprintf("with the search domain %s cut off, %s", m.Searched, whyName(m.Base, m, key))
	case table.RulePTR, table.RuleNone:
	}
	return ""
}
