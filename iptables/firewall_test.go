package iptables_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// siteRules returns the rules of other programs in chain OUTPUT of table filter.
func (l *lab) siteRules() (rules []string) {
	l.t.Helper()
	for line := range strings.Lines(l.sh("iptables-nft-save -t filter")) {
		if rule, ok := strings.CutPrefix(line, "-A OUTPUT "); ok && !strings.Contains(line, "NAMETAP") {
			rules = append(rules, strings.TrimSpace(rule))
		}
	}
	return rules
}

// hooked reports whether a table has the jumps to the chains of nametap.
func (l *lab) hooked(table string) bool {
	l.t.Helper()
	return strings.Contains(l.sh("iptables-nft-save -t %s", table), "-j NAMETAP_OUTPUT")
}

// K10, V8: a firewall that replaces its rules in two steps, and inserts one by number in the second step, finds no
// rule of nametap before its own in table filter. Queries are redirected meanwhile.
func TestFirewallInsertsByNumber(t *testing.T) {
	t.Parallel()
	const flush = "*nat\n-F\n-X\nCOMMIT\n*filter\n-F\n-X\n"
	for name, test := range map[string]struct {
		first, second string
		limit         time.Duration // for both steps
	}{
		"nothing is left": {flush + "COMMIT\n", "*filter\n-A OUTPUT -d 192.0.2.1 -j DROP\n-A OUTPUT -d 192.0.2.2 -j DROP\n-I OUTPUT 2 -d 192.0.2.3 -j DROP\nCOMMIT\n", time.Second},
		"some are there":  {flush + "-A OUTPUT -d 192.0.2.1 -j DROP\n-A OUTPUT -d 192.0.2.2 -j DROP\nCOMMIT\n", "*filter\n-I OUTPUT 2 -d 192.0.2.3 -j DROP\nCOMMIT\n", 150 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, kind{iptables.NFT, family.IPv4})
			l.ns.Run(func() {
				c := l.apply()
				l.set(c, true, l.config())
				l.keep(c)
				<-c.Begun()
				restore := func(text string) { l.ns.Pipe(text, "iptables-nft-restore", "-n", "-w", "5") }
				const said = "filter: chain NAMETAP_OUTPUT is missing"
				for took := test.limit; took >= test.limit; { // a busy machine is slow
					lines, began := l.log.Count(said), time.Now()
					restore(test.first)
					wait.Until(t, "queries are redirected", func() bool { return l.hooked("nat") })
					restore(test.second)
					took = time.Since(began)
					wait.Until(t, "table filter is repaired", func() bool { return l.log.Count(said) > lines && l.hooked("filter") })
				}
				want := []string{"-d 192.0.2.1/32 -j DROP", "-d 192.0.2.3/32 -j DROP", "-d 192.0.2.2/32 -j DROP"}
				if got := l.siteRules(); !slices.Equal(got, want) {
					t.Errorf("the rules of the firewall are %q, want %q", got, want)
				}
				l.complete(c)
			})
		})
	}
}

// K10: table filter is repaired even if another program changes rules all the time.
func TestFirewallWithoutPause(t *testing.T) {
	t.Parallel()
	l := newLab(t, kind{iptables.NFT, family.IPv4})
	l.ns.Run(func() {
		c := l.apply()
		l.set(c, true, l.config())
		l.keep(c)
		<-c.Begun()
		cmd := exec.Command("sh", "-c", "while nft add table inet site && nft delete table inet site; do sleep 0.02; done")
		if err := l.ns.Start(cmd); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		l.sh("iptables-nft -w 5 -t filter -F OUTPUT")
		began := time.Now()
		wait.Until(t, "table filter is repaired", func() bool { return l.hooked("filter") })
		t.Logf("repaired after %v", time.Since(began))
	})
}
