package guard

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/yamltext"
)

// A Mode says what becomes of what a policy does not allow.
type Mode string

// The modes.
const (
	Enforce Mode = "enforce" // it is denied
	Audit   Mode = "audit"   // it is done, and recorded
)

// form is shown with errors about the form of a policy.
const form = "allow: [{names: [api.example.com], ports: [443]}]"

// defaultPort is the port of a name for which the policy names none.
const defaultPort = 443

// A Policy says which names outside of the mesh a workload may ask for, and reach. It is immutable.
type Policy struct {
	// File is the name of the file that has the policy, Hash the SHA-256 of its text, in hexadecimal, and Read when it was read.
	File, Hash string
	Read       time.Time
	// Mode is Enforce unless the file says otherwise.
	Mode Mode
	// Direct lists what the workload may reach without a name.
	Direct []Direct
	// Private reports whether an allowed name may lead to a private address: RFC 1918, RFC 6598 and RFC 4193.
	Private bool
	// Rules lists the rules in the order of the file: those of allow, then those of deny.
	Rules []*Rule

	names map[wire.Name]*clauses
}

// A Rule is an element of allow or of deny.
type Rule struct {
	Denies bool
	File   string
	Line   int // in the file, counted from 1
	Names  []string
	Ports  []uint16 // sorted; of a rule of allow, at least one
	Types  []uint16 // the types besides A, AAAA and HTTPS
}

// String returns FILE:LINE.
func (r *Rule) String() string { return r.File + ":" + strconv.Itoa(r.Line) }

// allows reports whether there is a rule, and it is one of allow.
func (r *Rule) allows() bool { return r != nil && !r.Denies }

// A Direct is a network that may be reached without a name.
type Direct struct {
	Prefix netip.Prefix // masked
	Port   uint16       // 0 for all
}

// Has reports whether an address and a port are among what may be reached.
func (d Direct) Has(to netip.AddrPort) bool {
	return d.Prefix.Contains(to.Addr()) && (d.Port == 0 || d.Port == to.Port())
}

// String returns the text that a policy has: a network, an address, or ADDRESS:PORT.
func (d Direct) String() string {
	switch {
	case d.Port != 0:
		return netip.AddrPortFrom(d.Prefix.Addr(), d.Port).String()
	case d.Prefix.IsSingleIP():
		return d.Prefix.Addr().String()
	}
	return d.Prefix.String()
}

// clauses has the rules about a name itself, and about all names below it. There are none for a name that only has such names
// below it.
type clauses struct{ self, below clause }

// A clause is the rule that allows, and the rule that denies; nil for none.
type clause struct{ allow, deny *Rule }

// Parse parses a policy. file is its name, for errors and verdicts. An error names the line, and what was expected.
func Parse(file string, text []byte) (*Policy, error) {
	var from policyFile
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	err := decoder.Decode(&from)
	switch {
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("guard policy %s: it is empty: want at least mode: %s", file, Enforce)
	case err == nil && !errors.Is(decoder.Decode(new(yaml.Node)), io.EOF):
		err = errors.New("want one document")
	}
	if err != nil {
		return nil, fmt.Errorf("guard policy %s: %w; want a form as in docs/guard.md, such as %s", file, yamltext.OneLine(err), form)
	}
	sum := sha256.Sum256(text)
	p := &Policy{
		File: file, Hash: hex.EncodeToString(sum[:]), Read: time.Now(), Mode: cmp.Or(Mode(from.Mode), Enforce),
		Private: from.Private == "allow", names: map[wire.Name]*clauses{},
	}
	var mistakes []error
	if p.Mode != Enforce && p.Mode != Audit {
		mistakes = append(mistakes, fmt.Errorf("mode %q: want %s or %s", from.Mode, Enforce, Audit))
	}
	if !slices.Contains([]string{"", "allow", "deny"}, from.Private) {
		mistakes = append(mistakes, fmt.Errorf("private %q: want allow or deny", from.Private))
	}
	for _, e := range from.Allow {
		mistakes = append(mistakes, p.add(e, false)...)
	}
	for _, e := range from.Deny {
		mistakes = append(mistakes, p.add(e, true)...)
	}
	for _, text := range from.Direct {
		direct, err := parseDirect(text.value)
		if err != nil {
			mistakes = append(mistakes, fmt.Errorf("line %d: direct %q: %w", text.line, text.value, err))
		}
		p.Direct = append(p.Direct, direct)
	}
	if err := errors.Join(mistakes...); err != nil {
		return nil, fmt.Errorf("guard policy %s: %s", file, strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return p, nil
}

// policyFile is the form of the file.
type policyFile struct {
	Mode    string    `yaml:"mode"`
	Allow   []element `yaml:"allow"`
	Deny    []element `yaml:"deny"`
	Direct  []scalar  `yaml:"direct"`
	Private string    `yaml:"private"`
}

// An element is one of the elements of allow or of deny.
type element struct {
	Names []scalar `yaml:"names"`
	Ports []scalar `yaml:"ports"`
	Types []scalar `yaml:"types"`
}

// A scalar is a text with its line.
type scalar struct {
	value string
	line  int
}

// UnmarshalYAML reads a scalar of any type.
func (s *scalar) UnmarshalYAML(node *yaml.Node) error {
	if s.line = node.Line; node.Kind != yaml.ScalarNode {
		return fmt.Errorf("line %d: want one text or number", node.Line)
	}
	return node.Decode(&s.value)
}

// add adds a rule, and returns what is wrong with it.
func (p *Policy) add(from element, denies bool) (mistakes []error) {
	if len(from.Names) == 0 {
		return []error{errors.New("a rule without names: want names: [NAME, …]")}
	}
	r := &Rule{Denies: denies, File: p.File, Line: from.Names[0].line}
	p.Rules = append(p.Rules, r)
	wrong := func(s scalar, key string, err error) {
		mistakes = append(mistakes, fmt.Errorf("line %d: %s %q: %w", s.line, key, s.value, err))
	}
	for _, s := range slices.Concat(from.Ports, from.Types) {
		if denies {
			wrong(s, "deny with ports or types,", errors.New("want only names: a denied name is denied for all"))
		}
	}
	for _, s := range from.Ports {
		port, err := strconv.ParseUint(s.value, 10, 16)
		if err != nil || port == 0 {
			wrong(s, "port", errors.New("want 1 to 65535"))
		}
		r.Ports = append(r.Ports, uint16(port)) //nolint:gosec // of 16 bits
	}
	if len(r.Ports) == 0 && !denies {
		r.Ports = []uint16{defaultPort}
	}
	slices.Sort(r.Ports)
	for _, s := range from.Types {
		code, err := wire.ParseType(s.value)
		if err != nil || code == dns.TypeANY || code == dns.TypeAXFR || code == dns.TypeIXFR {
			wrong(s, "type", errors.New("want a type of records, such as MX"))
		}
		r.Types = append(r.Types, code)
	}
	for _, s := range from.Names {
		if err := p.addName(s.value, r); err != nil {
			wrong(s, "name", err)
		}
	}
	return mistakes
}

// addName adds a name of a rule.
func (p *Policy) addName(text string, r *Rule) error {
	packed, wildcard, err := wire.AppendHost(nil, text)
	if _, noAddr := netip.ParseAddr(text); noAddr == nil {
		return errors.New("want a name: what is reached by its address belongs in direct")
	}
	if err != nil {
		return fmt.Errorf("want a name or *.NAME: %w", err)
	}
	r.Names = append(r.Names, strings.ToLower(strings.TrimSuffix(text, ".")))
	name := wire.Name(strings.TrimPrefix(string(packed), string(wire.WildcardLabel)))
	for above := name; above != wire.Root; above = above.Parent() {
		if p.names[above] == nil {
			p.names[above] = &clauses{}
		}
	}
	c := &p.names[name].self
	if wildcard {
		c = &p.names[name].below
	}
	place, other := &c.allow, c.deny
	if r.Denies {
		place, other = &c.deny, c.allow
	}
	switch {
	case *place != nil:
		return fmt.Errorf("it is in line %d, too", (*place).Line)
	case other != nil:
		return fmt.Errorf("line %d allows it", other.Line) // rules of deny are added last
	}
	*place = r
	return nil
}

// parseDirect parses an element of direct.
func parseDirect(text string) (Direct, error) {
	if to, err := netip.ParseAddrPort(text); err == nil && to.Port() != 0 && to.Addr().Zone() == "" {
		addr := to.Addr().Unmap()
		return Direct{netip.PrefixFrom(addr, addr.BitLen()), to.Port()}, nil
	}
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return Direct{Prefix: netip.PrefixFrom(addr, addr.BitLen())}, nil
	}
	prefix, err := netip.ParsePrefix(text)
	switch {
	case err != nil || prefix.Addr().Is4In6():
		return Direct{}, errors.New("want a network such as 10.96.0.0/12, an address, or ADDRESS:PORT")
	case prefix.Bits() == 0:
		return Direct{}, errors.New("it has all addresses; without a guard, that needs no policy")
	case prefix != prefix.Masked():
		return Direct{}, fmt.Errorf("it has bits beyond its length; want %s", prefix.Masked())
	}
	return Direct{Prefix: prefix}, nil
}

// A Verdict says what a policy makes of a question.
type Verdict uint8

// The verdicts.
const (
	Denied    Verdict = iota // the name does not exist for the workload
	NoData                   // the name exists, or names below it do, but it has no records of this type
	Carried                  // the name is answered with its VIPs
	Forwarded                // nameservers are asked
)

// Judge returns what the policy makes of a question, and the rule that says so; nil if there is no such rule. It does
// not regard the mode.
func (p *Policy) Judge(name wire.Name, qtype uint16) (Verdict, *Rule) {
	rule, exists := p.ruleOf(name)
	switch {
	case rule == nil && exists:
		return NoData, nil
	case rule == nil || rule.Denies:
		return Denied, rule
	case qtype == dns.TypeA || qtype == dns.TypeAAAA:
		return Carried, rule
	case slices.Contains(rule.Types, qtype):
		return Forwarded, rule
	}
	return NoData, rule
}

// ruleOf returns the rule about a name. Rules of deny come first, then rules that name the name itself, then the wildcard
// with the longest suffix. exists reports whether the policy has names below the name.
func (p *Policy) ruleOf(name wire.Name) (rule *Rule, exists bool) {
	if c := p.names[name]; c != nil {
		if c.self.deny != nil {
			return c.self.deny, true
		}
		rule, exists = c.self.allow, true
	}
	for suffix := name; suffix != wire.Root; {
		suffix = suffix.Parent()
		c := p.names[suffix]
		switch {
		case c == nil:
		case c.below.deny != nil:
			return c.below.deny, exists
		case rule == nil && !strings.HasPrefix(string(name), string(wire.WildcardLabel)): // "*" would stand for all names
			rule = c.below.allow
		}
	}
	return rule, exists
}

// CountNames returns how many names and wildcards the rules have.
func (p *Policy) CountNames() (n int) {
	for _, r := range p.Rules {
		n += len(r.Names)
	}
	return n
}

// exact returns the names that rules of allow name themselves, sorted.
func (p *Policy) exact() (names []wire.Name) {
	for name, c := range p.names {
		if c.self.allow != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Enforces reports whether there is a policy, and what it does not allow is denied.
func (p *Policy) Enforces() bool { return p != nil && p.Mode == Enforce }

// Names reports whether a rule of allow names a name itself, and not only a wildcard above it.
func (p *Policy) Names(name wire.Name) bool {
	return p.names[name] != nil && p.names[name].self.allow != nil
}

// Reason says for people why a question has the verdict. rule is the rule that Judge has returned.
func (p *Policy) Reason(v Verdict, rule *Rule) string { return string(p.AppendReason(nil, v, rule)) }

// AppendReason appends the text of [Policy.Reason] to dst.
func (p *Policy) AppendReason(dst []byte, v Verdict, rule *Rule) []byte {
	before, after := "guard: allowed by ", ""
	switch {
	case rule == nil && v == NoData:
		return append(append(append(dst, "guard: "...), p.File...), " allows only names below it"...)
	case rule == nil:
		return append(append(append(dst, "guard: no rule of "...), p.File...), " allows it"...)
	case v == Denied:
		before = "guard: denied by "
	case v == NoData:
		before, after = "guard: ", " does not name this type"
	}
	dst = append(append(append(dst, before...), rule.File...), ':')
	return append(strconv.AppendInt(dst, int64(rule.Line), 10), after...)
}
