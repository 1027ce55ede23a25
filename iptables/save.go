package iptables

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// saved is what iptables-save says about one family in one backend: tables by
// name. A table that is not there was never used.
type saved map[string]*savedTable

// savedTable is one table.
type savedTable struct {
	chains []savedChain
	rules  []savedRule
}

// savedChain is a chain; the policy of a user's chain is "-".
type savedChain struct {
	name, policy string
}

// savedRule is a rule: the chain it is in, where it jumps or goes to (""
// without a target) and the rest of its line after -A and the chain.
type savedRule struct {
	chain, target, spec string
}

// parseSave reads the output of iptables-save, with or without counters.
func parseSave(text []byte) (saved, error) {
	s := make(saved)
	var t *savedTable
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimRight(lines.Text(), " \r")
		switch {
		case line == "" || line[0] == '#':
			if name, ok := incompatible(line); ok && slices.Contains(tableNames(), name) {
				return nil, fmt.Errorf("table %q %w", name, errIncompatible)
			}
			continue
		case line[0] == '*':
			t = new(savedTable)
			s[line[1:]] = t
			continue
		case line == "COMMIT":
			t = nil
			continue
		}
		if t == nil || !t.add(line) {
			return nil, fmt.Errorf("line %d of iptables-save's output, %q, is none that we know", n, line)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading iptables-save's output: %w", err)
	}
	return s, nil
}

// incompatible returns the table that a comment says cannot be read.
func incompatible(line string) (string, bool) {
	name, rest, ok := strings.Cut(strings.TrimPrefix(line, "# Table `"), "'")
	return name, ok && strings.HasPrefix(line, "# Table `") && strings.HasPrefix(rest, " is incompatible")
}

// add takes a line that is in a table, and says whether it understood it.
func (t *savedTable) add(line string) bool {
	if chain, ok := strings.CutPrefix(line, ":"); ok {
		name, rest, ok := strings.Cut(chain, " ")
		policy, _, _ := strings.Cut(rest, " ")
		t.chains = append(t.chains, savedChain{name, policy})
		return ok && name != ""
	}
	if line[0] == '[' { // counters, with iptables-save -c
		_, line, _ = strings.Cut(line, " ")
	}
	rule, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return false
	}
	chain, spec, _ := strings.Cut(rule, " ")
	t.rules = append(t.rules, savedRule{chain: chain, target: targetOf(spec), spec: spec})
	return chain != ""
}

// targetOf returns what stands after -j or -g. A quoted text (a comment) may hold
// such words too and does not count.
func targetOf(spec string) string {
	previous := ""
	for _, word := range words(spec) {
		if previous == "-j" || previous == "-g" {
			return word
		}
		previous = word
	}
	return ""
}

// words splits a rule at blanks. A quoted text is one word, with its quotes.
func words(spec string) []string {
	var out []string
	start, quoted := -1, false
	for i := 0; i < len(spec); i++ {
		switch c := spec[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
			if start < 0 {
				start = i
			}
		case c == ' ' && !quoted:
			if start >= 0 {
				out = append(out, spec[start:i])
			}
			start = -1
		case start < 0:
			start = i
		}
	}
	if start >= 0 {
		out = append(out, spec[start:])
	}
	return out
}

// own returns our chains in a table, the mark of a new table not among them.
// It may be called on nil.
func (t *savedTable) own() []string {
	var names []string
	if t == nil {
		return nil
	}
	for _, c := range t.chains {
		if strings.HasPrefix(c.name, ownPrefix) && c.name != madeTable {
			names = append(names, c.name)
		}
	}
	return names
}

// made says whether our mark of a new table is there.
func (t *savedTable) made() bool {
	return t != nil && slices.ContainsFunc(t.chains, func(c savedChain) bool { return c.name == madeTable })
}

// jumps returns the rules of others' chains that lead to ours.
func (t *savedTable) jumps() []savedRule {
	var jumps []savedRule
	if t == nil {
		return nil
	}
	for _, r := range t.rules {
		if strings.HasPrefix(r.target, ownPrefix) && !strings.HasPrefix(r.chain, ownPrefix) {
			jumps = append(jumps, r)
		}
	}
	return jumps
}

// in returns the rules of one chain, in order, without -A and the chain.
func (t *savedTable) in(chain string) []string {
	var specs []string
	if t == nil {
		return nil
	}
	for _, r := range t.rules {
		if r.chain == chain {
			specs = append(specs, r.spec)
		}
	}
	return specs
}

// foreign counts what in a table is not ours: rules, users' chains, and
// policies that somebody set.
func (t *savedTable) foreign() int {
	n := 0
	for _, c := range t.chains {
		if !strings.HasPrefix(c.name, ownPrefix) && c.policy != "ACCEPT" {
			n++
		}
	}
	for _, r := range t.rules {
		if !strings.HasPrefix(r.chain, ownPrefix) && !strings.HasPrefix(r.target, ownPrefix) {
			n++
		}
	}
	return n
}

// ours says whether any rule or chain is ours.
func (s saved) ours() bool {
	for _, t := range s {
		if len(t.own())+len(t.jumps()) > 0 {
			return true
		}
	}
	return false
}

// marked says whether any table has the mark that we made it.
func (s saved) marked() bool {
	for _, t := range s {
		if t.made() {
			return true
		}
	}
	return false
}

// foreign counts what is not ours in all tables.
func (s saved) foreign() int {
	n := 0
	for _, t := range s {
		n += t.foreign()
	}
	return n
}

// redirections returns the ports to which our rules in the nat table redirect.
func (s saved) redirections() []string {
	var ports []string
	for _, chain := range s["nat"].own() {
		for _, spec := range s["nat"].in(chain) {
			ws := words(spec)
			if i := slices.Index(ws, "--to-ports"); i >= 0 && i+1 < len(ws) && !slices.Contains(ports, ws[i+1]) {
				ports = append(ports, ws[i+1])
			}
		}
	}
	return ports
}

// equal says whether two tables hold the same chains and rules in the same order.
func (t *savedTable) equal(u *savedTable) bool {
	if t == nil || u == nil {
		return t == u
	}
	return slices.Equal(t.chains, u.chains) && slices.Equal(t.rules, u.rules)
}
