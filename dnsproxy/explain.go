package dnsproxy

import (
	"fmt"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// An Explanation says how a question is answered and by which rule.
type Explanation struct {
	// Name and Type are the question.
	Name string `json:"name"`
	Type string `json:"type"`
	// Rows are the rows of docs/behaviour.md that apply: first the rows for the name,
	// then the row for the type.
	Rows []string `json:"rows"`
	// Rule is the rule by which the table has found the name.
	Rule table.Rule `json:"rule"`
	// Host is the key of the table's entry that answers, if there is one.
	Host string `json:"host,omitempty"`
	// Source is where the answer comes from: table, upstream or self, as in metrics.
	Source string `json:"source"`
	// Why is the explanation for people.
	Why string `json:"why"`
}

// Explain says how a question is answered and why. It sends no query to a nameserver. It fails
// if name is not a domain name or qtype is not a record type.
func (s *Server) Explain(name, qtype string) (Explanation, error) {
	code, err := wire.ParseType(qtype)
	if err != nil {
		return Explanation{}, err
	}
	packed, err := wire.PackName(name)
	if err != nil {
		return Explanation{}, fmt.Errorf("name %q: want a domain name: %w", name, err)
	}
	q := wire.Question{Name: wire.Fold(packed), Type: code, Class: dns.ClassINET}
	current := s.handler.table.Load()
	d := s.handler.inUse.Load().decide(q, current, new(table.Scratch))
	e := Explanation{
		Name: dns.Fqdn(name), Type: wire.TypeName(code),
		Rows: d.rows(q), Rule: d.match.Rule, Source: d.source(),
	}
	host := &d.match.Host
	if last := len(e.Rows) - 1; code == dns.TypeAAAA && e.Rows[last] == "A2" && len(host.V4) > 0 && s.handler.nat64.Prefix() != nil {
		e.Rows[last] = "A15"
	}
	if e.Rule == "" {
		e.Rule = table.RuleNone
	}
	if host.Name != wire.Root {
		e.Host = host.Key()
	}
	e.Why = explainDecision(d, q.Name, e.Host)
	if d.action == actTarget && d.target != q.Name {
		e.Why += ", as " + strings.TrimSuffix(d.target.String(), ".")
	}
	if policy := s.config.Guard.Policy(); policy != nil && d.leaves() {
		e.Why += "; " + policy.Reason(policy.Judge(d.outside(q.Name), code))
		if policy.Mode == guard.Audit {
			e.Why += " (only audited)"
		}
	}
	return e, nil
}
