package iptables_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
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
		if backend == iptables.NFT && after != untouched {
			t.Errorf("a machine without rules has, afterwards:\n%s", after)
		}
		if strings.Contains(after, "NAMETAP") || strings.Contains(after, "-A ") {
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

// K3, V8: tables that nametap made are deleted even if another program has removed all rules and
// chains from them meanwhile, as firewalld does when it starts.
func TestRemoveAfterFlush(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		if l.backend != iptables.NFT {
			return // only nft has tables of nametap's own
		}
		untouched := l.saves()
		c := l.with(l.config())
		apply(l.t, c)
		captured := l.saves()
		for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
			for _, table := range []string{"nat", "raw"} {
				l.ns.Exec(tool, "-w", "5", "-t", table, "-F")
				l.ns.Exec(tool, "-w", "5", "-t", table, "-X")
			}
		}
		apply(l.t, c)
		if got := l.saves(); got != captured {
			l.t.Errorf("after the repair the rules are\n%s\nwant\n%s", got, captured)
		}
		remove(l.t, c)
		if after := l.saves(); after != untouched {
			l.t.Errorf("left behind:\n%s", after)
		}
	})
}

// K3, V8: tables that nametap made are deleted even if another program has removed their chains
// between reading and writing, as netfilter-persistent does when it flushes all rules.
func TestRemoveAfterFlushMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLab(t, kind{iptables.NFT, family.IPv4})
	l.ns.Run(func() {
		untouched := l.saves()
		c := l.with(l.config())
		apply(t, c)
		captured := l.saves()
		flush := tool(t, "iptables-nft") + " -w 5 -t raw"
		l.sh("%s -F", flush)
		const name = "iptables-nft-restore"
		flushed := filepath.Join(t.TempDir(), "flushed")
		l.tools(map[string]string{name: fmt.Sprintf("mkdir %s && %s -X\nexec %s \"$@\"", flushed, flush, tool(t, name))})
		apply(t, c)
		if _, err := os.Stat(flushed); err != nil {
			t.Error("nothing was removed meanwhile:", err)
		}
		if got := l.saves(); got != captured {
			t.Errorf("after the repair the rules are\n%s\nwant\n%s", got, captured)
		}
		remove(t, c)
		if after := l.saves(); after != untouched {
			t.Errorf("left behind:\n%s", after)
		}
	})
}

// K3, V8: tables that nametap made are deleted even if another program has removed all chains since, as firewalld does
// when it starts. Tables that another program has made stay.
func TestRemoveAfterLastFlush(t *testing.T) {
	t.Parallel()
	l := newLab(t, kind{iptables.NFT, family.IPv4})
	l.ns.Run(func() {
		l.sh("%s -w 5 -t filter -P OUTPUT ACCEPT", tool(t, "iptables-nft")) // makes a table
		untouched := l.saves()
		c := l.with(l.config())
		apply(t, c)
		for _, table := range []string{"raw", "nat", "filter"} {
			flush := tool(t, "iptables-nft") + " -w 5 -t " + table
			l.sh("%[1]s -F && %[1]s -X", flush)
		}
		remove(t, c)
		if after := l.saves(); after != untouched {
			t.Errorf("left behind:\n%s\nwant\n%s", after, untouched)
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

// K3, K4: apply is killed before, during and after each iptables-restore, while the other
// backend holds earlier rules of nametap.
func TestApplyKilled(t *testing.T) {
	t.Parallel()
	moments := []string{"before", "within", "after"}
	if testing.Short() {
		moments = []string{"within"}
	}
	backends(t, func(l *lab) {
		t := l.t
		l.addForeign(iptables.NFT)
		l.addForeign(iptables.Legacy)
		before := l.saves()
		cleaner := l.capture(auto)
		applyHalf := func(step int, how string) int {
			t.Helper()
			l.apply(func(c *iptables.Config) { c.Backend = l.other() })
			return l.killedApply(step, how)
		}
		steps := applyHalf(0, "never")
		complete := l.saves()
		remove(t, cleaner)
		if steps < 4 {
			t.Fatalf("apply took %d steps, want one a family and what the other backend takes", steps)
		}
		t.Logf("%d steps", steps)
		for step := 1; step <= steps; step++ {
			for _, how := range moments {
				applyHalf(step, how)
				if how == "within" { // this case is repaired, too
					l.killedApply(0, "never")
					if after := l.saves(); after != complete {
						t.Errorf("killed %s step %d, and applied again:\n%s\nwant:\n%s", how, step, after, complete)
					}
					remove(t, cleaner)
					applyHalf(step, how)
				}
				remove(t, cleaner)
				if after := l.saves(); after != before {
					t.Errorf("killed %s step %d, and removed:\n%s\nwant:\n%s", how, step, after, before)
				}
			}
		}
	})
}

// killedApply applies the default rules in another process and kills it at a step, which is
// an iptables-restore. It returns the number of steps.
func (l *lab) killedApply(step int, how string) int {
	t := l.t
	t.Helper()
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, b := range []string{"nft", "legacy"} {
			tool := fmt.Sprintf("%s-%s-restore", family, b)
			path, err := exec.LookPath(tool)
			if err != nil {
				t.Fatal(err)
			}
			script := fmt.Sprintf(`#!/bin/sh
n=$(($(cat %[1]s/n 2>/dev/null || echo 0) + 1))
echo $n >%[1]s/n
if [ $n = %[2]d ]; then
	case %[3]s in
	within) sed /^COMMIT/q | %[4]s "$@" ;;
	after) %[4]s "$@" ;;
	esac
	kill -9 $PPID
	exit 1
fi
exec %[4]s "$@"
`, dir, step, how, path)
			if err := os.WriteFile(filepath.Join(dir, tool), []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd := self(envApply, string(l.backend))
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	if out, killed := l.output(cmd); killed != (how != "never") {
		t.Fatalf("apply, killed %s step %d: %s", how, step, out)
	}
	count, err := os.ReadFile(filepath.Join(dir, "n"))
	if err != nil {
		if how == "never" {
			return 0
		}
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(count)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}
