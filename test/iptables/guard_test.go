package iptables_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// guarded is a change of the configuration: a guard that enforces.
func guarded(c *iptables.Config) {
	c.Guard = &iptables.Guard{Direct: []iptables.Direct{{Prefix: netip.MustParsePrefix("10.96.0.0/12")}}}
	c.EgressPort, c.VIPs = 15054, []netip.Prefix{netip.MustParsePrefix("240.64.0.0/10"), netip.MustParsePrefix("2001:2::/48")}
}

// G10: a kernel that lacks what the guard needs, over one family or both, is an error with the name of the module. There is
// no reduced guard.
func TestGuardLacksModule(t *testing.T) {
	t.Parallel()
	const message = "RULE_APPEND failed (No such file or directory): rule in chain NAMETAP_GUARD"
	for _, families := range [][]string{{"iptables", "ip6tables"}, {"ip6tables"}} {
		for text, module := range map[string]string{"-j REJECT": "ipt_REJECT", "--ctstate": "xt_conntrack"} {
			t.Run(strings.Join(families, "+")+module, func(t *testing.T) {
				t.Parallel()
				backends(t, func(l *lab) {
					for _, name := range families {
						l.failing(name, text, message)
					}
					c := l.capture(guarded)
					err := c.Apply(l.t.Context())
					if err == nil || errors.Is(err, iptables.ErrIncomplete) || !strings.Contains(err.Error(), module) || !strings.Contains(err.Error(), "guarding IPv") {
						l.t.Errorf("apply: %v", err)
					}
					if strings.Contains(l.saves(), "NAMETAP_TRY") {
						l.t.Errorf("left:\n%s", l.saves())
					}
				})
			})
		}
	}
}

// G10: an apply that fails half-way leaves the guard, also if an earlier one was there, and the next apply completes it.
func TestGuardFailsHalfWay(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		scripts := map[string]string{}
		for _, name := range []string{"iptables", "ip6tables"} {
			full := fmt.Sprintf("%s-%s-restore", name, l.backend)
			scripts[full] = fmt.Sprintf(`input=$(cat)
case $input in *"*nat"*) echo "$input" | sed -n '/^\*filter/,/^COMMIT/p' | %[1]s "$@"; echo %[2]q >&2; exit 4 ;; esac
echo "$input" | exec %[1]s "$@"
`, tool(l.t, full), refused)
		}
		for range 2 {
			working := l.tools(scripts)
			if err := l.capture(guarded, func(c *iptables.Config) { c.ExcludeUIDs = []uint32{7} }).Apply(l.t.Context()); err == nil {
				l.t.Error("apply has not failed")
			}
			rules := l.saves()
			if n := strings.Count(rules, "-A OUTPUT -m comment --comment \"nametap: guard\" -j NAMETAP_GUARD"); n != 0 && n != 2 && !strings.Contains(rules, "-A OUTPUT -j NAMETAP_GUARD") {
				l.t.Errorf("the guard is not there:\n%s", rules)
			}
			if !strings.Contains(rules, "REJECT --reject-with tcp-reset") || strings.Contains(rules, "REDIRECT") {
				l.t.Errorf("left:\n%s", rules)
			}
			working()
			l.complete(l.apply(guarded))
			if l.saves() == rules {
				l.t.Error("the rules are not complete")
			}
			if status, err := l.apply(guarded).Status(l.t.Context()); err != nil || status.Families[0].Guard != iptables.GuardEnforces || status.Families[1].Guard != iptables.GuardEnforces {
				l.t.Errorf("%+v, %v", status, err)
			}
			remove(l.t, l.capture())
		}
	})
}

// G9: rules of the nft tool in table filter, which iptables cannot read, do not make the guard give up table filter silently.
func TestGuardBesideNFT(t *testing.T) {
	t.Parallel()
	l := newLab(t, kind{iptables.NFT, family.IPv4})
	l.ns.Run(func() {
		l.sh("iptables-nft -A OUTPUT -p udp --dport 9 -j RETURN; nft add rule ip filter OUTPUT numgen inc mod 2 0 accept")
		err := l.capture(guarded).Apply(t.Context())
		if err == nil || !strings.Contains(err.Error(), "the guard cannot be installed: table filter") {
			t.Errorf("apply: %v", err)
		}
	})
}
