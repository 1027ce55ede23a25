package guard_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const example = `
mode: enforce
allow:
- names: [api.example.com, registry.example.org]
- names: ["*.pkg.example.net"]
- names: [git.example.com]
  ports: [443, 22]
- names: [mail.example.com]
  types: [MX, TXT]
deny:
- names: [telemetry.example.com, "*.bad.pkg.example.net", worse.pkg.example.net]
direct: ["10.96.0.0/12", "10.0.5.7:4317", "2001:db8::1"]
private: allow
`

func name(t *testing.T, text string) wire.Name {
	t.Helper()
	n, err := wire.ParseHostname(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func parse(t *testing.T, text string) *guard.Policy {
	t.Helper()
	p, err := guard.Parse("policy.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// G1: which names are allowed, with which types and ports.
func TestJudge(t *testing.T) {
	p := parse(t, example)
	for _, c := range []struct {
		name, qtype string
		want        guard.Verdict
		reason      string
	}{
		{"api.example.com", "A", guard.Carried, "allowed by policy.yaml:4"},
		{"api.example.com", "AAAA", guard.Carried, "allowed by policy.yaml:4"},
		{"api.example.com", "HTTPS", guard.NoData, "policy.yaml:4 does not name this type"},
		{"api.example.com", "TXT", guard.NoData, "policy.yaml:4 does not name this type"},
		{"mail.example.com", "MX", guard.Forwarded, "allowed by policy.yaml:8"},
		{"mail.example.com", "A", guard.Carried, "allowed by policy.yaml:8"},
		{"example.com", "A", guard.NoData, "policy.yaml allows only names below it"},
		{"pkg.example.net", "A", guard.NoData, "policy.yaml allows only names below it"},
		{"a.pkg.example.net", "A", guard.Carried, "allowed by policy.yaml:5"},
		{"a.b.pkg.example.net", "A", guard.Carried, "allowed by policy.yaml:5"},
		{"worse.pkg.example.net", "A", guard.Denied, "denied by policy.yaml:11"},
		{"x.bad.pkg.example.net", "A", guard.Denied, "denied by policy.yaml:11"},
		{"bad.pkg.example.net", "A", guard.Carried, "allowed by policy.yaml:5"},
		{"telemetry.example.com", "A", guard.Denied, "denied by policy.yaml:11"},
		{"x.api.example.com", "A", guard.Denied, "no rule of policy.yaml allows it"},
		{"api.example.com.corp.example", "A", guard.Denied, "no rule of policy.yaml allows it"},
	} {
		code, err := wire.ParseType(c.qtype)
		if err != nil {
			t.Fatal(err)
		}
		v, rule := p.Judge(name(t, c.name), code)
		if got := p.Reason(v, rule); v != c.want || got != "guard: "+c.reason {
			t.Errorf("%s %s: %v, %q, want %v, %q", c.name, c.qtype, v, got, c.want, c.reason)
		}
	}
	if _, rule := p.Judge(name(t, "git.example.com"), dns.TypeA); fmt.Sprint(rule.Ports) != "[22 443]" {
		t.Errorf("git.example.com has the ports %v", rule.Ports)
	}
	if _, rule := p.Judge(name(t, "api.example.com"), dns.TypeA); fmt.Sprint(rule.Ports) != "[443]" {
		t.Errorf("api.example.com has the ports %v", rule.Ports)
	}
	if got := fmt.Sprint(p.Direct, p.Private); got != "[10.96.0.0/12 10.0.5.7:4317 2001:db8::1] true" || p.Mode != guard.Enforce {
		t.Error(got)
	}
}

// G15: what is wrong with a policy, and where.
func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                             "it is empty: want at least mode: enforce",
		"mode: enforced":               `mode "enforced": want enforce or audit`,
		"modes: enforce":               "line 1: field modes not found",
		"private: maybe":               `private "maybe": want allow or deny`,
		"allow:\n- ports: [22]":        "a rule without names",
		"allow:\n- names: [\"*\"]":     `line 2: name "*": want a name or *.NAME`,
		"allow:\n- names: [a.b, A.b.]": `line 2: name "A.b.": it is in line 2, too`,
		"allow:\n- names: [a.b]\ndeny:\n- names: [a.b]": `line 4: name "a.b": line 2 allows it`,
		"allow:\n- names: [a.b]\n  ports: [0]":          `line 3: port "0": want 1 to 65535`,
		"allow:\n- names: [a.b]\n  types: [FOO]":        `line 3: type "FOO": want a type of records, such as MX`,
		"deny:\n- names: [a.b]\n  ports: [22]":          "want only names",
		"direct: [0.0.0.0/0]":                           "line 1: direct \"0.0.0.0/0\": it has all addresses",
		"direct: [10.0.0.1/8]":                          "want 10.0.0.0/8",
		"direct: [example.com]":                         "want a network such as 10.96.0.0/12",
		"mode: enforce\n---\nmode: audit":               "want one document",
		"allow: [a.b]":                                  "want a form as in docs/guard.md, such as allow: [{names: ",
		"allow:\n- names: [\"2001:db8::1\"]":            `line 2: name "2001:db8::1": want a name: what is reached by its address belongs in direct`,
	} {
		if _, err := guard.Parse("policy.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// G4: a name has the same VIPs after a change of the policy, and in another process. Names that meet have different VIPs.
func TestVIPs(t *testing.T) {
	one, two := guard.New("key"), guard.New("key")
	one.Use(parse(t, example))
	two.Use(parse(t, "allow:\n- names: [api.example.com]"))
	for _, text := range []string{"api.example.com", "a.pkg.example.net"} {
		n := name(t, text)
		pair := one.VIPs(n)
		if pair != two.VIPs(n) || pair == guard.New("other").VIPs(n) {
			t.Errorf("%s: %v and %v", text, pair, two.VIPs(n))
		}
		for _, vip := range []netip.Addr{pair.V4, pair.V6} {
			if got := one.Name(vip); got != n || !guard.IsVIP(vip) || !one.Owns(n, vip) {
				t.Errorf("%s of %s: %s", vip, text, got)
			}
		}
	}
	owners := map[netip.Addr]string{}
	for i := range 6000 { // names below wildcards give way, with their VIPs
		text := fmt.Sprintf("n%d.pkg.example.net", i)
		pair := one.VIPs(name(t, text))
		owners[pair.V4], owners[pair.V6] = text, text
	}
	known := 0
	for vip, text := range owners {
		if got := one.Name(vip); got != "" && got != name(t, text) {
			t.Errorf("%s of %s is of %s", vip, text, got)
		} else if got != "" {
			known++
		}
	}
	if known != 2*4096 {
		t.Errorf("%d VIPs are known, want 8192", known)
	}
	first := name(t, "n0.pkg.example.net")
	if pair := one.VIPs(first); !one.Owns(first, pair.V4) {
		t.Errorf("%s is not of %s", pair.V4, first)
	}
}

// G4: a name that a new policy names has its first VIP, also if a name below a wildcard had it, which then has another.
func TestVIPsMeet(t *testing.T) {
	first, second := wire.Root, wire.Root
	for i, owners := 0, map[netip.Addr]wire.Name{}; second == wire.Root; i++ {
		n := name(t, fmt.Sprintf("n%d.pkg.example.net", i))
		vip := guard.New("key").VIPs(n).V4
		if first = owners[vip]; first != wire.Root {
			second = n
		}
		owners[vip] = n
	}
	g := guard.New("key")
	g.Use(parse(t, example))
	vip := g.VIPs(first)
	if other := g.VIPs(second); other == vip || g.Name(other.V6) != second {
		t.Errorf("both have %v", vip)
	}
	g.Use(parse(t, fmt.Sprintf("allow:\n- names: [%s]", strings.TrimSuffix(second.String(), "."))))
	if g.VIPs(second) != vip || g.Name(vip.V4) != second || g.VIPs(first) == vip || g.Name(g.VIPs(first).V4) != first {
		t.Errorf("%s and %s: %v and %v", first, second, g.VIPs(first), g.VIPs(second))
	}
}

// G1: the verdict about a name takes no allocation.
func TestJudgeAllocates(t *testing.T) {
	g := guard.New("key")
	g.Use(parse(t, example))
	denied, below := name(t, "a.very.long.name.example.com"), name(t, "x.pkg.example.net")
	if n := testing.AllocsPerRun(100, func() {
		g.Policy().Judge(denied, dns.TypeA)
		g.Policy().Judge(below, dns.TypeA)
		g.VIPs(below)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParse(f *testing.F) { // G15
	f.Add(example)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := guard.Parse("policy.yaml", []byte(text))
		if err != nil {
			return
		}
		g := guard.New("")
		g.Use(p)
		for _, r := range p.Rules {
			for _, n := range r.Names {
				if v, rule := p.Judge(name(t, strings.TrimPrefix(n, "*.")), dns.TypeA); v == guard.Carried && rule.Denies {
					t.Errorf("%s is allowed by line %d, which denies", n, rule.Line)
				}
			}
		}
	})
}
