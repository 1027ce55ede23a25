package dnsproxy

import (
	"errors"
	"fmt"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// rows returns the rows of docs/behaviour.md by which a question was decided: first the rows
// for its name, then the row for its type.
func (d *decision) rows(q wire.Question) []string {
	if errors.Is(d.reason, errDenied) {
		return nameRows(d.match)
	}
	switch d.action {
	case actHold:
		return []string{"C6"}
	case actPointers:
		return []string{"N8"}
	case actAddresses, actTarget, actUnless:
		if d.match.Rule == table.RulePTR {
			return []string{"N8"}
		}
		return append(nameRows(d.match), d.typeRows(q)...)
	case actUnknown:
		return []string{"F12"}
	case actGuarded:
		switch {
		case d.verdict == guard.Carried:
			return []string{"G4"}
		case d.verdict == guard.NoData && d.rule != nil:
			return []string{"G5"}
		}
		return []string{"G3"}
	case actForward, actReject:
		switch {
		case errors.Is(d.reason, errGuarded):
			return []string{"G5"}
		case errors.Is(d.reason, errBypass):
			return []string{"F12"}
		case errors.Is(d.reason, errNotSynced):
			return []string{"C6"}
		case errors.Is(d.reason, errTransfer):
			return append(nameRows(d.match), "A4")
		case d.action == actForward:
			return []string{"N9"}
		}
	case actSpecial:
		return []string{"N7"}
	case actChaos:
	}
	return []string{"A10"}
}

// typeRows returns the row for the type of a question. If the host is an alias, it returns the row for aliases
// first. If the row for the name also covers the type, typeRows returns none.
func (d *decision) typeRows(q wire.Question) []string {
	var rows []string
	if d.match.BaseRule() == table.RulePort && q.Type == dns.TypeSRV {
		return nil
	}
	if d.match.Host.Alias() != wire.Root {
		rows = append(rows, "D9")
		if q.Type == dns.TypeCNAME {
			return rows
		}
	}
	return append(rows, d.typeRow(q))
}

func (d *decision) typeRow(q wire.Question) string {
	switch {
	case q.Type == dns.TypeANY:
		return "A5"
	case q.Type == dns.TypeHTTPS || q.Type == dns.TypeSVCB:
		return "A3"
	case q.Type == dns.TypeSRV && hasServices(&d.match, q.Name, d.table):
		return "D22"
	case !answersAlways(q.Type):
		return "A4"
	case q.Type == dns.TypeA && len(d.match.Host.V4) == 0,
		q.Type == dns.TypeAAAA && len(d.match.Host.V6) == 0:
		return "A2"
	default:
		return "A1"
	}
}

// nameRows returns the rows that describe how the table has found a name.
func nameRows(m table.Match) []string {
	switch m.Rule {
	case table.RuleExact:
		return []string{"N1"}
	case table.RuleEndpoint:
		return []string{"D21"}
	case table.RulePort:
		return []string{"D22"}
	case table.RuleWildcard:
		return []string{"N4"}
	case table.RuleShortName:
		return []string{"N2"}
	case table.RuleAutopath:
		return append([]string{"N5"}, nameRows(table.Match{Rule: m.Base})...)
	case table.RulePTR, table.RuleNone:
		if m.Denied != wire.Root {
			return []string{"N9"}
		}
	}
	return nil
}

// explainDecision explains the decision about name to people. key is the key of the host, if there is one.
func explainDecision(d decision, name wire.Name, key string) string {
	switch d.action {
	case actHold:
		return fmt.Sprintf("no table yet: the query is held for up to %s", holdTimeout)
	case actPointers:
		return "the PTR name of a Service's address"
	case actAddresses:
		return "in the mesh table: " + explainName(d.match.Rule, d.match, key) + d.explainHost()
	case actTarget:
		return "in the mesh table: " + explainName(d.match.Rule, d.match, key) + d.explainHost() +
			"; forwarded, because the table has no records of this type"
	case actUnless:
		if d.action = actAddresses; d.match.Denied != wire.Root {
			d.action = actUnknown
		}
		return explainDecision(d, name, key) + ", if nameservers do not have " + strings.TrimSuffix(d.target.String(), ".")
	case actForward:
		switch {
		case errors.Is(d.reason, errNotSynced):
			return "no table yet, and not below the cluster domain: forwarded"
		case d.reason != nil:
			return d.reason.Error() + ": forwarded"
		}
		return "not in the mesh table: forwarded"
	case actUnknown:
		switch {
		case d.match.Rule == table.RuleWildcard:
			return explainName(d.match.Rule, d.match, key) + ", but made by a search domain from another mesh name: NXDOMAIN"
		case d.exists(name):
			return "an ancestor of mesh names: NODATA"
		}
		return fmt.Sprintf("not in the mesh table, and such names below %s are not forwarded: NXDOMAIN", d.zone)
	case actGuarded:
		return d.explainGuarded()
	case actReject, actChaos, actSpecial:
	}
	if d.reason != nil {
		return d.reason.Error()
	}
	return ""
}

// vacant reports whether the host has no address at all, as a headless Service without a ready endpoint.
func (d *decision) vacant() bool {
	return d.action == actAddresses && len(d.match.Host.V4)+len(d.match.Host.V6) == 0 && d.match.Host.Alias() == wire.Root
}

// explainGuarded explains what the guard answers.
func (d *decision) explainGuarded() string {
	answer := map[guard.Verdict]string{guard.Denied: "NXDOMAIN", guard.NoData: "NODATA", guard.Carried: "its VIP"}[d.verdict]
	return d.policy.Reason(d.verdict, d.rule) + ": " + answer
}

func (d *decision) explainHost() string {
	if d.vacant() && d.match.Rule != table.RulePTR {
		return ", which has no address: is it a headless Service without a ready endpoint?"
	}
	if alias := d.match.Host.Alias(); alias != wire.Root {
		return ", an alias of " + strings.TrimSuffix(alias.String(), ".")
	}
	return ""
}

func explainName(rule table.Rule, m table.Match, key string) string {
	switch rule {
	case table.RuleExact:
		return "the host's FQDN"
	case table.RuleEndpoint:
		return "an endpoint of the headless Service " + key
	case table.RulePort:
		return "a port of the Service " + key
	case table.RuleWildcard:
		return "below the wildcard " + key
	case table.RuleShortName:
		return "short name of " + key
	case table.RuleAutopath:
		return fmt.Sprintf("after removing the search domain %s: %s", m.Searched, explainName(m.Base, m, key))
	case table.RulePTR:
		return "the PTR name of an external host's address"
	case table.RuleNone:
	}
	return ""
}
