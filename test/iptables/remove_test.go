package iptables_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
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

// K3, K4: apply is killed during each iptables-restore, while the other
// backend holds earlier rules of nametap.
func TestApplyKilled(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.addForeign(iptables.NFT)
		l.addForeign(iptables.Legacy)
		before := l.saves()
		cleaner := l.capture(auto)
		applyHalf := func(step int) int {
			t.Helper()
			l.apply(func(c *iptables.Config) { c.Backend = l.other() })
			return l.killedApply(step)
		}
		steps := applyHalf(0)
		complete := l.saves()
		remove(t, cleaner)
		if steps < 4 {
			t.Fatalf("apply took %d steps, want one a family and what the other backend takes", steps)
		}
		t.Logf("%d steps", steps)
		for step := 1; step <= steps; step++ {
			applyHalf(step)
			l.killedApply(0) // repairs it
			if after := l.saves(); after != complete {
				t.Errorf("killed within step %d, and applied again:\n%s\nwant:\n%s", step, after, complete)
			}
			remove(t, cleaner)
			applyHalf(step)
			remove(t, cleaner)
			if after := l.saves(); after != before {
				t.Errorf("killed within step %d, and removed:\n%s\nwant:\n%s", step, after, before)
			}
		}
	})
}

// killedApply applies the default rules in another process, and kills it within a step, which is
// an iptables-restore, unless step is 0. It returns the number of steps.
func (l *lab) killedApply(step int) int {
	t := l.t
	t.Helper()
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, b := range []string{"nft", "legacy"} {
			name := fmt.Sprintf("%s-%s-restore", family, b)
			script := fmt.Sprintf(`#!/bin/sh
n=$(($(cat %[1]s/n 2>/dev/null || echo 0) + 1))
echo $n >%[1]s/n
if [ $n = %[2]d ]; then
	sed /^COMMIT/q | %[3]s "$@"
	kill -9 $PPID
	exit 1
fi
exec %[3]s "$@"
`, dir, step, tool(t, name))
			process.WriteScript(t, filepath.Join(dir, name), script)
		}
	}
	cmd := self(envApply, string(l.backend))
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	if out, killed := l.output(cmd); killed != (step > 0) {
		t.Fatalf("apply, killed within step %d: %s", step, out)
	}
	n, _ := strconv.Atoi(strings.TrimSpace(l.sh("cat %s/n || true", dir)))
	return n
}
