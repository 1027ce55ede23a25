package iptables_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/iptables"
)

// foreignRules are rules of other programs, in nametap's tables and in others, with
// comments that look like nametap's.
const foreignRules = `*nat
:KUBE-SERVICES - [0:0]
-A OUTPUT -m comment --comment "say \"hi\" -j NAMETAP_OUTPUT" -j KUBE-SERVICES
-A KUBE-SERVICES -d 192.0.2.7/32 -p udp -m udp --dport 53 -j DNAT --to-destination 10.77.0.3:53
-A POSTROUTING -s 10.99.0.0/16 -j MASQUERADE
COMMIT
*raw
-A PREROUTING -p tcp -m tcp --dport 9 -j NOTRACK
COMMIT
*filter
-A FORWARD -s 192.0.2.0/24 -j DROP
COMMIT
`

func (l *lab) addForeign(backend iptables.Backend) {
	l.t.Helper()
	v6 := strings.NewReplacer("192.0.2.7/32", "fd99::7/128", "10.77.0.3:53", "[fd77::3]:53",
		"10.99.0.0/16", "fd99::/16", "192.0.2.0/24", "fd99:1::/32").Replace(foreignRules)
	l.ns.Pipe(foreignRules, "iptables-"+string(backend)+"-restore", "--noflush", "-w", "5")
	l.ns.Pipe(v6, "ip6tables-"+string(backend)+"-restore", "--noflush", "-w", "5")
}

// K3
func TestRemove(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := l.config()
		untouched := l.saves()
		apply(t, l.with(cfg))
		remove(t, l.with(cfg))
		after := l.saves()
		if strings.Contains(after, "NAMETAP") || after != untouched {
			t.Errorf("left behind:\n%s", after)
		}

		l.addForeign(backend)
		before := l.saves()
		cfg.VirtualInterfaces = []string{"docker0"}
		cfg.ExcludeUIDs = []uint32{7}
		apply(t, l.with(cfg))
		if l.saves() == before {
			t.Fatal("nothing was applied")
		}
		// Remove runs with other settings.
		remove(t, l.capture(auto))
		if after := l.saves(); after != before {
			t.Errorf("after remove:\n%s\nbefore apply:\n%s", after, before)
		}
		remove(t, l.capture(auto))
		if after := l.saves(); after != before {
			t.Errorf("after the second remove:\n%s\nbefore apply:\n%s", after, before)
		}
	})
}

// K3: a table that nametap made and that other programs use now stays, without nametap's
// rules.
func TestRemoveFromSharedTable(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := l.config()
		apply(t, l.with(cfg))
		l.sh("iptables-%[1]s -w 5 -t nat -A OUTPUT -d 192.0.2.1 -j ACCEPT; ip6tables-%[1]s -w 5 -t raw -P OUTPUT DROP", backend)
		l.sh("iptables-%[1]s -w 5 -t nat -N OTHERS; iptables-%[1]s -w 5 -t nat -A OTHERS -j NAMETAP_OUTPUT", backend)
		remove(t, l.with(cfg))
		after := l.saves()
		if strings.Contains(after, "NAMETAP") || !strings.Contains(after, "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT") ||
			!strings.Contains(after, ":OUTPUT DROP") {
			t.Errorf("after remove:\n%s", after)
		}
	})
}
