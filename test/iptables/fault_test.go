package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// tool returns the path of a tool of iptables.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// complete fails the test unless both families have all rules.
func (l *lab) complete(c *iptables.Capture) {
	l.t.Helper()
	status, err := c.Status(l.t.Context())
	if err != nil {
		l.t.Fatal(err)
	}
	for _, f := range status.Families {
		if f.State != iptables.InPlace || len(f.Without) > 0 || f.Error != "" {
			l.t.Errorf("%+v", f)
		}
	}
	for f, level := range c.Levels() {
		if level != iptables.LevelComplete {
			l.t.Errorf("%s: level %s", f, level)
		}
	}
}

// K13: tools are killed before, during and after their work, and other programs change rules between reading and writing.
func TestApplyWithKilledTools(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		dir := l.t.TempDir()
		scripts := map[string]string{}
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, name := range []string{"save", "restore"} {
				full := fmt.Sprintf("%s-%s-%s", family, l.backend, name)
				scripts[full] = fmt.Sprintf(`n=$(($(cat %[1]s/%[2]s 2>/dev/null || echo 0) + 1))
echo $n >%[1]s/%[2]s
case %[4]s$((n %% 5)) in
save1 | restore1) kill -9 $$ ;;
restore2) sed /^COMMIT/q | %[3]s "$@"; kill -9 $$ ;;
restore3) %[3]s "$@"; kill -9 $$ ;;
restore4) %[5]s -w 5 -t nat -I OUTPUT 1 -p udp --dport 9 -j ACCEPT; %[5]s -w 5 -t raw -D OUTPUT 1 ;;
esac
exec %[3]s "$@"
`, dir, full, tool(l.t, full), name, tool(l.t, fmt.Sprintf("%s-%s", family, l.backend)))
			}
		}
		before := l.saves()
		working := l.tools(scripts)
		for range 2 {
			c := l.capture()
			apply(l.t, c)
			l.complete(c)
			remove(l.t, c)
		}
		working()
		if strings.Contains(l.saves(), "NAMETAP") {
			l.t.Errorf("left:\n%s\nbefore:\n%s", l.saves(), before)
		}
	})
}

// refused and passing are messages of tools: after the first, the tool is not run again at once.
const refused, passing = "Permission denied", "Resource temporarily unavailable"

// failing makes iptables-restore of a family fail with a message if its input contains
// text, until working is called.
func (l *lab) failing(family, text, message string) (working func()) {
	l.t.Helper()
	name := fmt.Sprintf("%s-%s-restore", family, l.backend)
	return l.tools(map[string]string{name: fmt.Sprintf(`input=$(cat)
case $input in *%q*) echo %q >&2; exit 4 ;; esac
echo "$input" | exec %s "$@"
`, text, message, tool(l.t, name))})
}

// K13: a transient failure is reported and retried, and the other rules are installed
// meanwhile.
func TestIncomplete(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		working := l.failing("ip6tables", "--zone-orig", passing)
		c := l.capture(quick)
		err := c.Apply(t.Context())
		if !errors.Is(err, iptables.ErrIncomplete) || !strings.Contains(err.Error(), passing) {
			t.Fatalf("apply: %v", err)
		}
		if levels := c.Levels(); levels[family.IPv4] != iptables.LevelComplete || levels[family.IPv6] != iptables.LevelFailed {
			t.Errorf("levels %v", levels)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Families[0].State != iptables.InPlace || status.Families[1].State != iptables.Absent ||
			status.Families[1].Error == "" {
			t.Errorf("status %+v, %v", status, err)
		}
		l.keep(c)
		wait.Until(t, "the failure is counted again", func() bool { return c.Stats().Failures > 1 })
		if n := l.log.Count("capture is incomplete"); n != 1 {
			t.Errorf("said %d times:\n%s", n, l.log)
		}
		working()
		wait.Until(t, "all is in", func() bool { return c.Levels()[family.IPv6] == iptables.LevelComplete })
		l.complete(c)
	})
}

// K2: an apply that fails over both families leaves the rules that were installed before.
func TestFailureKeepsRules(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		l.apply()
		before := l.saves()
		for _, name := range []string{"iptables", "ip6tables"} {
			l.failing(name, "--to-ports", refused)
		}
		err := l.capture(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{7} }).Apply(l.t.Context())
		if err == nil || errors.Is(err, iptables.ErrIncomplete) {
			l.t.Errorf("apply: %v", err)
		}
		if after := l.saves(); after != before {
			l.t.Errorf("left:\n%s\nbefore:\n%s", after, before)
		}
	})
}

// K10: while no nft rule changes, no program is run.
func TestQuietReconcile(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		t := l.t
		l.backend = iptables.NFT
		dir := t.TempDir()
		runs := filepath.Join(dir, "runs")
		scripts := map[string]string{}
		for _, backend := range []string{"nft", "legacy"} {
			for _, family := range []string{"iptables", "ip6tables"} {
				name := fmt.Sprintf("%s-%s-save", family, backend)
				scripts[name] = fmt.Sprintf("echo x >>%s; exec %s \"$@\"", runs, tool(t, name))
			}
		}
		l.tools(scripts)
		c := l.apply(busy)
		l.keep(c)
		count := func() int { return len(l.sh("cat %s", runs)) }
		looks := func(more uint64) {
			checks := c.Stats().Checks + more
			wait.Until(t, "more looks", func() bool { return c.Stats().Checks >= checks })
		}
		looks(5)
		before := count()
		looks(10)
		if n := count(); n != before {
			t.Errorf("%d programs were run", n-before)
		}
		l.sh("iptables-%s -w 5 -t nat -F NAMETAP_OUTPUT", l.backend)
		wait.Until(t, "drift is repaired", func() bool { return c.Stats().Repairs == 1 })
		l.complete(c)
	})
}

// K10: if rules are missing for a moment that no check has seen, no socket keeps bypassing
// the agent.
func TestShortDrift(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(quick)
		rules := l.sh("%s -t nat", l.tool("-save"))
		conn := l.socket()
		l.wantOn(conn, "AU")
		stuck := l.socket()
		l.sh("%s -w 5 -t nat -F OUTPUT", l.tool(""))
		l.wantOn(stuck, "U")
		l.ns.Pipe(rules, l.tool("-restore"), "-w", "5")
		l.keep(c)
		l.becomes(stuck, "AU")
		l.wantOn(conn, "AU")
		if n := c.Stats().Repairs; n > 0 {
			t.Errorf("%d repairs, so the test shows nothing", n)
		}
	})
}

// K10: a reply that arrives after the entry of its query was dropped makes an entry of its own.
// That one is dropped too, or the socket would stay on its old path.
func TestDropWithReplyInFlight(t *testing.T) {
	t.Parallel()
	for name, natOnly := range map[string]bool{"zone": false, "no zone": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			labs(t, diagonal(), func(l *lab) {
				t := l.t
				l.agent()
				c := l.apply(quick, func(c *iptables.Config) { c.NATOnly, c.Settle = natOnly, time.Minute })
				conn := l.socket()
				l.flush()
				l.askHeld(conn)
				l.keep(c)
				wait.Until(t, "the rules are repaired", func() bool { return c.Stats().Repairs == 1 })
				l.wantHeld(conn, "U")
				l.becomes(conn, "AU")
			})
		})
	}
}

// K4, K13: rules of nametap in the other backend that cannot be removed do not make apply
// fail. They are removed later.
func TestApplyBesideLockedBackend(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.apply(func(c *iptables.Config) { c.Backend = l.other() })
		scripts := map[string]string{}
		for _, family := range []string{"iptables", "ip6tables"} {
			name := fmt.Sprintf("%s-%s-restore", family, l.other())
			scripts[name] = `echo "Another app is currently holding the xtables lock. Stopped waiting after 5s." >&2; exit 4`
		}
		working := l.tools(scripts)
		c := l.capture(quick)
		if err := c.Apply(t.Context()); !errors.Is(err, iptables.ErrIncomplete) || !strings.Contains(err.Error(), string(l.other())) {
			t.Errorf("apply: %v", err)
		}
		l.keep(c)
		looks := c.Stats().Failures + 2
		wait.Until(t, "retries", func() bool { return c.Stats().Failures >= looks })
		if n := l.log.Count("capture rules had drifted and were repaired"); n > 0 {
			t.Errorf("logged %d times that all is repaired:\n%s", n, l.log)
		}
		working()
		want := map[iptables.Backend]string{iptables.NFT: inNFT, iptables.Legacy: inLegacy}[l.backend]
		wait.Until(t, "the rules are in one backend", func() bool { return l.holders() == want })
		l.complete(c)
	})
}

// K9: if a tool of the other backend hangs, also for a status, no query stays captured.
func TestRemoveBesideHangingSave(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		t := l.t
		c := l.apply(func(c *iptables.Config) { c.Backend = iptables.NFT })
		l.sh("iptables-legacy -w 5 -t nat -A OUTPUT -d 127.0.0.11 -j ACCEPT")
		hung := filepath.Join(t.TempDir(), "hung")
		l.tools(map[string]string{"iptables-legacy-save": fmt.Sprintf("mkdir -p %[1]s; until [ -e %[1]s.over ]; do sleep 0.1; done", hung)})
		ctx, cancel := context.WithCancel(t.Context())
		var asking sync.WaitGroup
		asking.Go(func() { l.ns.Run(func() { _, _ = c.Status(ctx) }) }) // the output does not matter
		wait.Until(t, "the status waits", func() bool { return exists(hung) })
		asking.Go(func() { l.ns.Run(func() { _ = c.Remove(ctx) }) })
		wait.Until(t, "DNS is not captured", func() bool { return !strings.Contains(l.saves(), "-j NAMETAP_OUTPUT") })
		cancel()
		l.sh("touch %s.over", hung)
		asking.Wait()
	})
}
