package iptables

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

// saved is the parsed output of iptables-save for one family in one backend: tables by name.
// A table that is missing was never used.
type saved map[string]savedTable

// savedTable is one table of the output.
type savedTable struct {
	chains     []savedChain
	rules      []savedRule
	unreadable bool // it has rules that only the nft tool can read
}

// savedChain is a chain; the policy of a user's chain is "-".
type savedChain struct {
	name, policy string
}

// savedRule is a rule: its chain, the target of -j or -g ("" without one), its line
// without -A and the chain, and the counter of packets, if it was read.
type savedRule struct {
	chain, target, spec string
	packets             uint64
}

// parseSave reads the output of iptables-save, with or without counters.
func parseSave(text []byte) (saved, error) {
	s := make(saved)
	var name string // of the present table
	var t *savedTable
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimRight(lines.Text(), " \r")
		switch {
		case line == "" || line[0] == '#':
			switch other, ok := incompatible(line); {
			case ok && other == filterTable:
				s[other] = savedTable{unreadable: true}
			case ok && slices.Contains(tableNames(), other):
				return nil, fmt.Errorf("%w: table %q %s", errRefused, other, errIncompatible)
			}
			continue
		case line[0] == '*':
			name, t = line[1:], new(savedTable)
			continue
		case line == "COMMIT" && t != nil:
			s[name], t = *t, nil
			continue
		}
		if t == nil || !t.add(line) {
			return nil, fmt.Errorf("line %d of the output of iptables-save is not recognised: %q", n, line)
		}
	}
	err := lines.Err()
	if t != nil {
		err = cmp.Or(err, io.ErrUnexpectedEOF)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the output of iptables-save: %w", err)
	}
	return s, nil
}

// incompatible returns the name of a table and true if line is the comment of iptables-save for a table that it
// cannot read.
func incompatible(line string) (string, bool) {
	name, rest, ok := strings.Cut(strings.TrimPrefix(line, "# Table `"), "'")
	return name, ok && strings.HasPrefix(line, "# Table `") && strings.HasPrefix(rest, " is incompatible")
}

// add parses a line of a table. It returns false if the line is not recognised.
func (t *savedTable) add(line string) bool {
	if chain, ok := strings.CutPrefix(line, ":"); ok {
		name, rest, ok := strings.Cut(chain, " ")
		policy, _, _ := strings.Cut(rest, " ")
		t.chains = append(t.chains, savedChain{name, policy})
		return ok && name != ""
	}
	var packets uint64
	if line[0] == '[' { // counters, with iptables-save -c
		counters, rule, _ := strings.Cut(line, " ")
		text, _, _ := strings.Cut(counters[1:], ":")
		packets, _ = strconv.ParseUint(text, 10, 64)
		line = rule
	}
	rule, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return false
	}
	chain, spec, _ := strings.Cut(rule, " ")
	t.rules = append(t.rules, savedRule{chain: chain, target: targetOf(spec), spec: spec, packets: packets})
	return chain != ""
}

// targetOf returns the word after -j or -g. It ignores quoted comments.
func targetOf(spec string) string {
	ws := words(spec)
	return cmp.Or(valueOf(ws, "-j"), valueOf(ws, "-g"))
}

// valueOf returns the word after an option of a rule, or "" if the rule does not have the option. ws are the rule's
// words.
func valueOf(ws []string, option string) string {
	if i := slices.Index(ws, option); i >= 0 && i+1 < len(ws) {
		return ws[i+1]
	}
	return ""
}

// words splits a rule at spaces. A quoted text is one word, with its quotes.
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

// ownChains returns the chains of nametap in a table.
func (t savedTable) ownChains() (names []string) {
	for _, c := range t.chains {
		if strings.HasPrefix(c.name, ownPrefix) {
			names = append(names, c.name)
		}
	}
	return names
}

// jumps returns the rules of other chains that jump to nametap's chains.
func (t savedTable) jumps() (jumps []savedRule) {
	for _, r := range t.rules {
		if strings.HasPrefix(r.target, ownPrefix) && !strings.HasPrefix(r.chain, ownPrefix) {
			jumps = append(jumps, r)
		}
	}
	return jumps
}

// rulesIn returns the rules of a chain, in order, without -A and the chain.
func (t savedTable) rulesIn(chain string) (specs []string) {
	for _, r := range t.rules {
		if r.chain == chain {
			specs = append(specs, r.spec)
		}
	}
	return specs
}

// foreign counts what other programs have in a table: rules, chains, and policies other than
// the default.
func (t savedTable) foreign() int {
	n := t.foreignRules()
	for _, c := range t.chains {
		if !strings.HasPrefix(c.name, ownPrefix) && c.policy != "ACCEPT" {
			n++
		}
	}
	return n
}

// foreignRules counts the rules of other programs in a table.
func (t savedTable) foreignRules() (n int) {
	for _, r := range t.rules {
		if !strings.HasPrefix(r.chain, ownPrefix) && !strings.HasPrefix(r.target, ownPrefix) {
			n++
		}
	}
	return n
}

// hasOwn reports whether any table has chains of nametap or jumps to them.
func (s saved) hasOwn() bool {
	for _, t := range s {
		if len(t.ownChains())+len(t.jumps()) > 0 {
			return true
		}
	}
	return false
}

// leased reports whether nametap's rules of a family have a lease.
func (s saved) leased(f family.Family) bool {
	for _, chain := range s["nat"].ownChains() {
		for _, rule := range s["nat"].rulesIn(chain) {
			if strings.Contains(rule, "--name "+leaseName(f)+" ") {
				return true
			}
		}
	}
	return false
}

// foreign counts what other programs have in all tables.
func (s saved) foreign() int {
	n := 0
	for _, t := range s {
		n += t.foreign()
	}
	return n
}

// redirections returns the ports to which nametap's rules in table nat redirect.
func (s saved) redirections() (ports []uint16) {
	for _, chain := range s["nat"].ownChains() {
		for _, spec := range s["nat"].rulesIn(chain) {
			if port := redirection(spec); port != 0 && !slices.Contains(ports, port) {
				ports = append(ports, port)
			}
		}
	}
	return ports
}

// redirection returns the port to which a rule redirects, or 0 if it is no redirect.
func redirection(spec string) uint16 {
	port, _ := strconv.ParseUint(valueOf(words(spec), "--to-ports"), 10, 16) // 0 for a range, which nametap never writes
	return uint16(port)
}

// equal reports whether two tables have the same chains and rules in the same order.
func (t savedTable) equal(u savedTable) bool {
	return slices.Equal(t.chains, u.chains) && slices.Equal(t.rules, u.rules)
}

// port returns the port to which the rules redirect queries of this host, or 0 if they redirect none. All redirects
// of port 53 go to the same port, and they come before the redirects of VIPs.
func (s saved) port() uint16 {
	nat := s["nat"]
	if !slices.ContainsFunc(nat.jumps(), func(r savedRule) bool { return r.target == outputChain }) {
		return 0
	}
	for _, spec := range nat.rulesIn(outputChain) {
		if port := redirection(spec); port != 0 {
			return port
		}
	}
	return 0
}
