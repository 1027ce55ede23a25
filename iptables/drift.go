package iptables

import (
	"fmt"
	"slices"
	"strings"
)

// drift returns in how far what is saved differs from the rules of a family, in
// words for a log; nothing if not at all. Rules are compared as text and in
// order: our rules in another order make the agent's queries come back to it,
// and a rule before our jump takes queries past the agent.
func (r Rules) drift(f Family, s saved) []string {
	var ds []string
	for _, name := range tableNames() {
		ds = append(ds, r.table(f, name).drift(s[name])...)
	}
	return ds
}

func (t table) drift(have *savedTable) []string {
	var ds []string
	say := func(format string, args ...any) {
		ds = append(ds, t.name+": "+fmt.Sprintf(format, args...))
	}
	jumps := 0
	for _, c := range t.chains {
		jumps += len(c.jumps)
		if !slices.Contains(have.own(), c.name) {
			say("chain %s is missing", c.name)
			continue
		}
		if rules := have.in(c.name); !slices.Equal(rules, c.rules) {
			say("%s %s", c.name, difference(c.rules, rules))
		}
		if head := head(have.in(c.parent), len(c.jumps)); !slices.Equal(head, c.jumps) {
			say("%s does not begin with the jumps to %s, but with %q", c.parent, c.name, head)
		}
	}
	for _, name := range have.own() {
		if !t.wants(name) {
			say("chain %s is not wanted", name)
		}
	}
	if n := len(have.jumps()); n > jumps {
		say("%d jumps to our chains, %d are wanted", n, jumps)
	}
	return ds
}

// difference says how the rules of a chain differ.
func difference(want, have []string) string {
	if len(want) != len(have) {
		return fmt.Sprintf("has %d rules, %d are wanted", len(have), len(want))
	}
	for i := range want {
		if want[i] != have[i] {
			return fmt.Sprintf("has rule %d %q, %q is wanted", i+1, have[i], want[i])
		}
	}
	return "is the same"
}

func head(specs []string, n int) []string { return specs[:min(n, len(specs))] }

// change returns the text for iptables-restore --noflush that turns what is
// saved into the rules of a family, table by table; "" if there is nothing to
// do. Nothing of others is touched. With mark, a table that was not there before
// gets the chain that says so; a mark that is there stays.
func (r Rules) change(f Family, s saved, mark bool) string {
	var b strings.Builder
	for _, name := range tableNames() {
		t, have := r.table(f, name), s[name]
		if len(t.drift(have)) > 0 {
			t.change(&b, have, mark && have == nil)
		}
	}
	return b.String()
}

func (t table) change(b *strings.Builder, have *savedTable, mark bool) {
	fmt.Fprintf(b, "*%s\n", t.name)
	if mark {
		fmt.Fprintf(b, ":%s - [0:0]\n", madeTable)
	}
	for _, c := range t.chains {
		fmt.Fprintf(b, ":%s - [0:0]\n", c.name) // made, or flushed if it is there
	}
	takeJumps(b, have)
	unwanted := slices.DeleteFunc(have.own(), t.wants)
	for _, name := range unwanted {
		fmt.Fprintf(b, "-F %s\n", name)
	}
	for _, name := range unwanted { // none is jumped to any more
		fmt.Fprintf(b, "-X %s\n", name)
	}
	for _, c := range t.chains {
		for i, j := range c.jumps {
			fmt.Fprintf(b, "-I %s %d %s\n", c.parent, i+1, j)
		}
		for _, rule := range c.rules {
			fmt.Fprintf(b, "-A %s %s\n", c.name, rule)
		}
	}
	b.WriteString("COMMIT\n")
}

func takeJumps(b *strings.Builder, have *savedTable) {
	for _, j := range have.jumps() {
		fmt.Fprintf(b, "-D %s %s\n", j.chain, j.spec)
	}
}

// unhookText returns the text that removes the jumps to nametap's chains, and nothing
// else; "" if there are none.
func unhookText(s saved) string {
	var b strings.Builder
	for _, name := range tableNames() {
		if len(s[name].jumps()) > 0 {
			fmt.Fprintf(&b, "*%s\n", name)
			takeJumps(&b, s[name])
			b.WriteString("COMMIT\n")
		}
	}
	return b.String()
}

// wants says whether a chain of ours is one of the table's.
func (t table) wants(name string) bool {
	return slices.ContainsFunc(t.chains, func(c chain) bool { return c.name == name })
}

// unmark returns the text that takes our mark out of a table.
func unmark(name string) string { return fmt.Sprintf("*%s\n-X %s\nCOMMIT\n", name, madeTable) }

// deletable says whether a table was made by us and holds nothing by now.
func (t *savedTable) deletable() bool {
	return t.made() && t.foreign()+len(t.own())+len(t.jumps()) == 0
}
