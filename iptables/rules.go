package iptables

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

// The names of nametap's chains.
const (
	ownPrefix       = "NAMETAP_"
	outputChain     = ownPrefix + "OUTPUT"
	preroutingChain = ownPrefix + "PREROUTING"
	inputChain      = ownPrefix + "INPUT"
)

// tableNames returns the tables that nametap uses, in the order in which they are changed.
func tableNames() []string { return []string{filterTable, "nat", "raw"} }

// filterTable is the table of firewalls.
const filterTable = "filter"

// zone is the conntrack zone of captured UDP queries. Without a zone, the kernel treats queries of an application and
// queries of the agent as one flow if they have the same source port and the same server.
const zone = 53

// dnsPort is the destination port of the queries that are captured.
const dnsPort = 53

// Rules are the rules that capture DNS, for both families, as text. The zero value captures
// nothing: applying it removes all rules of nametap. Rules never change.
type Rules struct {
	families map[family.Family][]table
	spare    string // a table that the rules leave as it is, "" for none
}

// sparing returns a copy of r that leaves a table of the kernel as it is; "" for no further table.
func (r Rules) sparing(table string) Rules { r.spare = cmp.Or(table, r.spare); return r }

// tableNames returns the tables that the rules may change, in the order in which they are changed.
func (r Rules) tableNames() []string {
	return slices.DeleteFunc(tableNames(), func(name string) bool { return name == r.spare })
}

// tables returns the rules of a family.
func (r Rules) tables(f family.Family) []table { return r.families[f] }

// table returns the rules of a family in one table.
func (r Rules) table(f family.Family, name string) table {
	for _, t := range r.tables(f) {
		if t.name == name {
			return t
		}
	}
	return table{name: name}
}

// Text returns the rules of a family as iptables-restore --noflush reads them, or "" if the family has no rules. It is for
// a machine without rules of nametap: the text that [Capture.Apply] restores also removes previous rules.
func (r Rules) Text(f family.Family) string { return r.change(f, saved{}) }

// drift lists how the saved rules of a family differ from r, as text for a log; the list is empty if they match.
// Rules are compared as text and in order: in another order, the rules might redirect the agent's queries to the
// agent, and a rule before nametap's jump might let queries bypass the agent.
func (r Rules) drift(f family.Family, s saved) []string {
	var ds []string
	for _, name := range r.tableNames() {
		ds = append(ds, r.table(f, name).drift(s[name])...)
	}
	return ds
}

// change returns the text for iptables-restore --noflush that turns the saved rules of a family into r, table by
// table. It returns "" if they match. The text changes no rules of other programs.
func (r Rules) change(f family.Family, s saved) string {
	var b strings.Builder
	for _, name := range r.tableNames() {
		if t := r.table(f, name); len(t.drift(s[name])) > 0 {
			t.change(&b, s[name])
		}
	}
	return b.String()
}

// table holds nametap's chains in one table of the kernel.
type table struct {
	name   string
	chains []chain
}

// chain is a chain of nametap, with the rules of a built-in chain that jump to it. Rules are
// as iptables-save prints them, without -A and the name of the chain.
type chain struct {
	name   string
	parent string
	jumps  []string
	rules  []string
}

func (t table) drift(inKernel savedTable) []string {
	var ds []string
	add := func(format string, args ...any) {
		ds = append(ds, t.name+": "+fmt.Sprintf(format, args...))
	}
	for _, c := range t.chains { // none of them is empty
		have := inKernel.rulesIn(c.name)
		for n, rule := range c.rules {
			if n >= len(have) || have[n] != rule {
				add("%s lacks rule %d, %q", c.name, n+1, rule)
				break
			}
		}
		if len(have) > len(c.rules) {
			add("%s has %d rules, want %d", c.name, len(have), len(c.rules))
		}
	}
	jumps := 0
	for _, parent := range t.parents() {
		want := t.jumpsIn(parent)
		jumps += len(want)
		have := inKernel.rulesIn(parent)
		if have = have[:min(len(have), len(want))]; !slices.Equal(have, want) {
			add("%s does not begin with the jumps to the chains of nametap, but with %q", parent, have)
		}
	}
	for _, name := range inKernel.ownChains() {
		if !t.wants(name) {
			add("chain %s is not one of the rules", name)
		}
	}
	if n := len(inKernel.jumps()); n > jumps {
		add("%d jumps to the chains of nametap, want %d", n, jumps)
	}
	return ds
}

func (t table) change(b *strings.Builder, inKernel savedTable) {
	fmt.Fprintf(b, "*%s\n", t.name)
	for _, c := range t.chains {
		fmt.Fprintf(b, ":%s - [0:0]\n", c.name) // creates the chain, or flushes it
	}
	deleteJumps(b, inKernel)
	unwanted := slices.DeleteFunc(inKernel.ownChains(), t.wants)
	for _, name := range unwanted {
		fmt.Fprintf(b, "-F %s\n", name)
	}
	for _, name := range unwanted { // no rule jumps to them now
		fmt.Fprintf(b, "-X %s\n", name)
	}
	for _, parent := range t.parents() {
		for i, j := range t.jumpsIn(parent) {
			fmt.Fprintf(b, "-I %s %d %s\n", parent, i+1, j)
		}
	}
	for _, c := range t.chains {
		for _, rule := range c.rules {
			fmt.Fprintf(b, "-A %s %s\n", c.name, rule)
		}
	}
	b.WriteString("COMMIT\n")
}

// parents returns the built-in chains that jump to nametap's chains.
func (t table) parents() (names []string) {
	for _, c := range t.chains {
		if !slices.Contains(names, c.parent) {
			names = append(names, c.parent)
		}
	}
	return names
}

// jumpsIn returns the jumps with which a built-in chain has to begin.
func (t table) jumpsIn(parent string) (jumps []string) {
	for _, c := range t.chains {
		if c.parent == parent {
			jumps = append(jumps, c.jumps...)
		}
	}
	return jumps
}

// wants reports whether t has a chain with this name.
func (t table) wants(name string) bool {
	return slices.ContainsFunc(t.chains, func(c chain) bool { return c.name == name })
}

// deleteJumps writes the deletion of all jumps to the chains of nametap.
func deleteJumps(b *strings.Builder, inKernel savedTable) {
	for _, j := range inKernel.jumps() {
		fmt.Fprintf(b, "-D %s %s\n", j.chain, j.spec)
	}
}

// unhookText returns the text that removes only the jumps to nametap's chains, or "" if
// there are no jumps.
func unhookText(s saved) string {
	var b strings.Builder
	for _, name := range tableNames() {
		if len(s[name].jumps()) > 0 {
			fmt.Fprintf(&b, "*%s\n", name)
			deleteJumps(&b, s[name])
			b.WriteString("COMMIT\n")
		}
	}
	return b.String()
}
