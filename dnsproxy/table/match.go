package table

import "github.com/nametap/nametap/dnsproxy/wire"

// A Rule says by which rule the table has found a name. The texts do not change
// between versions, because they are in logs, metrics and JSON.
type Rule string

// The rules in their order of precedence.
const (
	RuleExact     Rule = "exact"     // the host's FQDN
	RuleEndpoint  Rule = "endpoint"  // the address of an endpoint, followed by a name of the headless Service
	RulePort      Rule = "port"      // _name._protocol of a port, followed by a name of the Service
	RuleWildcard  Rule = "wildcard"  // below a *.suffix
	RuleShortName Rule = "shortname" // name, name.namespace, name.namespace.svc
	RuleAutopath  Rule = "autopath"  // one of the above, followed by a domain of the search list
	RulePTR       Rule = "ptr"       // the PTR name of a host's address
	RuleNone      Rule = "none"      // the table does not have the name
)

// A Match is the result of a lookup. It refers to the memory of the name, the table and the Scratch of the lookup, so
// it is valid only as long as they are.
type Match struct {
	Rule Rule
	// Host is the host that has the name. It is not set for RuleNone and RulePTR. For RuleEndpoint it
	// is the headless Service, with only the address of the endpoint.
	Host Host
	// Short is true if the host was found by a short name. Then Target is the FQDN.
	Short bool
	// Prefix has the labels before the name of the host, for RuleEndpoint and RulePort.
	Prefix wire.Name
	// For RuleAutopath, Searched is the domain of the search list, and Base is the rule by which the name without
	// this domain was found. Target is the target of the CNAME record: an FQDN if Short is set, otherwise, for
	// RuleAutopath, the name without the search domain. For RuleWildcard, Searched is a domain of the search list that
	// may have been added to Outside.
	Base             Rule
	Target, Searched wire.Name
	// Pointers are the FQDNs for RulePTR, sorted.
	Pointers []wire.Name
	// Outside is the name that nameservers are asked for first. If they have it, the match does not count. Outside is
	// the root if the match counts whatever nameservers have.
	Outside wire.Name
	// Denied is a zone that the name is in, if the name is known not to be anywhere else: then a negative answer has the
	// SOA record of this zone. It is the root if this is not known.
	Denied wire.Name
	// Bypassed is true if Rule is RuleNone although the table has the name, because the settings say that the name is
	// forwarded.
	Bypassed bool
}

// BaseRule returns Base for RuleAutopath, otherwise Rule.
func (m *Match) BaseRule() Rule {
	if m.Rule == RuleAutopath {
		return m.Base
	}
	return m.Rule
}

// Doubtful reports whether a search domain may have made the name from Outside. Then the match counts only if nameservers
// say that Outside does not exist, and not if they fail.
func (m *Match) Doubtful() bool {
	return m.Rule == RuleWildcard && m.Searched != wire.Root && m.Denied == wire.Root
}

// Alias returns the name of the host of which m's host is an alias. The answer for name has a CNAME record with this
// name as its target. Alias returns the root if m's host is no alias. It also returns the root if the CNAME record
// would make a loop: if its target is name, or m.Target, which the answer has already.
func (m *Match) Alias(name wire.Name) wire.Name {
	if alias := m.Host.Alias(); alias != name && alias != m.Target {
		return alias
	}
	return wire.Root
}

// Owner returns the name that owns the address records in the answer for name. It is the target of the last CNAME
// record, or name itself if there is none.
func (m *Match) Owner(name wire.Name) wire.Name {
	if alias := m.Alias(name); alias != wire.Root {
		return alias
	}
	if m.Target != wire.Root {
		return m.Target
	}
	return name
}

// A Scratch is memory for the result of one lookup at a time. The zero value is ready for use.
type Scratch struct {
	name     [wire.MaxNameLen]byte
	ptr      []wire.Name
	services []wire.Name
	dashed   []byte
}

// join concatenates two parts of a name. It reports false if the name is too long.
func (s *Scratch) join(head, tail wire.Name) (name wire.Name, ok bool) {
	if len(head)+len(tail) > wire.MaxNameLen {
		return "", false
	}
	n := copy(s.name[:], head)
	n += copy(s.name[n:], tail)
	return wire.Name(viewString(s.name[:n])), true
}
