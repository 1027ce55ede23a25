package wire

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// The names that lookups work on: what goes in comes out, in bounds, folded.
func FuzzNames(f *testing.F) { // N1, N8, N10
	for _, seed := range [][2]string{
		{"web.shop.svc.cluster.local", "cluster.local"},
		{"*.Example.com.", "COM"},
		{`a\.b\000\\.example.`, `b\000\\.example`},
		{"4.3.2.1.in-addr.arpa", "in-addr.arpa"},
		{strings.Repeat("1.", 32) + "ip6.arpa", "ip6.arpa"},
		{strings.Repeat("x.", 127), strings.Repeat("x", 63)},
		{".", ""}, {"*", "*."}, {"a..b", `\`},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, s, suffix string) {
		checkHost(t, s)
		wire, err := PackName(s)
		if err != nil {
			return
		}
		if len(wire) > MaxNameLen {
			t.Fatalf("%q is packed as % x", s, wire)
		}
		if again, err := PackName(Name(wire).String()); err != nil || string(again) != string(wire) {
			t.Errorf("% x is written %q, which is % x, %v", wire, Name(wire).String(), again, err)
		}
		name := Fold(wire)
		if name != Fold([]byte(name)) || len(name) != len(wire) || !strings.EqualFold(name.String(), Name(wire).String()) {
			t.Errorf("% x is folded to % x", wire, name)
		}
		if labels := dns.CountLabel(name.String()); labels != countLabels(name) {
			t.Errorf("%v has %d labels, and parent finds %d", name, labels, countLabels(name))
		}
		checkReverse(t, name)
		if packed, err := PackName(suffix); err == nil {
			checkSuffix(t, name, Fold(packed))
		}
	})
}

func countLabels(n Name) (labels int) {
	for ; n != Root; n = n.Parent() {
		labels++
	}
	return labels
}

// checkHost compares AppendHost with the DNS library's idea of a name.
func checkHost(t *testing.T, s string) {
	t.Helper()
	appended, wildcard, err := AppendHost([]byte("before"), s)
	name, ok := strings.CutPrefix(string(appended), "before")
	if !ok || err != nil && name != "" {
		t.Errorf("the key %q leaves %q behind", s, appended)
	}
	if err != nil {
		return
	}
	if wildcard {
		s = strings.TrimPrefix(s, "*.")
		name = strings.TrimPrefix(name, string(WildcardLabel))
	}
	wire, err := PackName(s)
	if err != nil || string(Fold(wire)) != name || strings.Contains(Name(name).String(), "*") {
		t.Errorf("the key %q is read as %v; packed % x, %v", s, Name(name), wire, err)
	}
	if _, ok := dns.IsDomainName(s); !ok {
		t.Errorf("the key %q is no name", s)
	}
}

// checkReverse compares ReverseAddr with the DNS library's reverse names.
func checkReverse(t *testing.T, name Name) {
	t.Helper()
	addr, ok := ReverseAddr(name)
	if !ok {
		return
	}
	if want, err := dns.ReverseAddr(addr.String()); err == nil && addr.Unmap() == addr && want != name.String() {
		t.Errorf("%v is read as %v, whose name is %s", name, addr, want)
	}
}

// checkSuffix compares CutSuffix, Join and Below with each other.
func checkSuffix(t *testing.T, name, suffix Name) {
	t.Helper()
	head, cut := name.CutSuffix(suffix)
	if below := name.Below(suffix); cut != (below && name != suffix && suffix != Root) {
		t.Errorf("%v below %v: %v, but cut: %v", name, suffix, below, cut)
	}
	if !cut {
		return
	}
	if joined, ok := head.Join(suffix); !ok || joined != name {
		t.Errorf("%v without %v is %v, and joined %v", name, suffix, head, joined)
	}
	if countLabels(head)+countLabels(suffix) != countLabels(name) || !strings.HasSuffix(name.String(), suffix.String()) {
		t.Errorf("%v without %v is %v", name, suffix, head)
	}
}

func TestReverseAddr(t *testing.T) { // N8
	t.Parallel()
	for _, s := range []string{"0.0.0.0", "10.0.0.1", "255.255.255.255", "::", "2001:db8::1", "ffff:ffff::ffff"} {
		addr := netip.MustParseAddr(s)
		reverse, err := dns.ReverseAddr(s)
		if err != nil {
			t.Fatal(err)
		}
		wire, err := PackName(reverse)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := ReverseAddr(Fold(wire)); !ok || got != addr {
			t.Errorf("%s is read as %v", reverse, got)
		}
	}
}
