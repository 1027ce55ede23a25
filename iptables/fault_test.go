package iptables_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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
		if f.State != iptables.InPlace || !f.Zone || len(f.Without) > 0 || f.Error != "" {
			l.t.Errorf("%+v", f)
		}
	}
	for f, level := range c.Levels() {
		if level != iptables.LevelComplete {
			l.t.Errorf("%s: level %s", f, level)
		}
	}
}

// K13: another program keeps inserting and deleting rules.
func TestApplyBesideOthers(t *testing.T) {
	t.Parallel()
	const rounds = 4
	backends(t, func(l *lab) {
		var stop []func()
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, table := range []string{"nat", "raw"} {
				script := fmt.Sprintf("while :; do %[1]s -I OUTPUT 1 -p udp --dport 9 -j ACCEPT; %[1]s -D OUTPUT -p udp --dport 9 -j ACCEPT; sleep 0.01; done",
					fmt.Sprintf("%s-%s -w 5 -t %s", family, l.backend, table))
				cmd := exec.Command("sh", "-c", script)
				if err := l.ns.Start(cmd); err != nil {
					l.t.Fatal(err)
				}
				stop = append(stop, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
			}
		}
		for range rounds {
			c := l.capture()
			if err := c.Apply(l.t.Context()); err != nil {
				l.t.Errorf("apply: %v\n%s", err, l.log)
			}
			for f, level := range c.Levels() {
				if level != iptables.LevelComplete {
					l.t.Errorf("%s: level %s\n%s", f, level, l.log)
				}
			}
			remove(l.t, c)
		}
		for _, stop := range stop {
			stop()
		}
	})
}

// K13: tools are killed before, during and after their work.
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
esac
exec %[3]s "$@"
`, dir, full, tool(l.t, full), name)
			}
		}
		before := l.saves()
		working := l.tools(scripts)
		for range 3 {
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

// failing makes iptables-restore of a family fail without a reason if its input contains
// text, until working is called.
func (l *lab) failing(family, text string) (working func()) {
	l.t.Helper()
	name := fmt.Sprintf("%s-%s-restore", family, l.backend)
	return l.tools(map[string]string{name: fmt.Sprintf(`input=$(cat)
case $input in *%q*) echo "Resource temporarily unavailable." >&2; exit 4 ;; esac
echo "$input" | exec %s "$@"
`, text, tool(l.t, name))})
}

// K13: a transient failure is reported and retried, and the other rules are installed
// meanwhile.
func TestIncomplete(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		family, text string
		level        iptables.Level
		v6           iptables.State
	}{
		{"ip6tables", "*", iptables.LevelFailed, iptables.Absent},
		{"ip6tables", "--zone-orig", iptables.LevelReduced, iptables.InPlace},
	} {
		t.Run(string(test.level), func(t *testing.T) {
			backends(t, func(l *lab) {
				t := l.t
				working := l.failing(test.family, test.text)
				c := l.capture(quick)
				err := c.Apply(t.Context())
				if !errors.Is(err, iptables.ErrIncomplete) || !strings.Contains(err.Error(), "Resource temporarily unavailable") {
					t.Fatalf("apply: %v", err)
				}
				if levels := c.Levels(); levels[family.IPv4] != iptables.LevelComplete || levels[family.IPv6] != test.level {
					t.Errorf("levels %v", levels)
				}
				status, err := c.Status(t.Context())
				if err != nil || status.Families[0].State != iptables.InPlace || status.Families[1].State != test.v6 ||
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
		})
	}
}

// K2: an apply that fails over both families leaves the rules that were installed before.
func TestFailureKeepsRules(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		l.apply()
		before := l.saves()
		for _, name := range []string{"iptables", "ip6tables"} {
			l.failing(name, "--to-ports")
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

// K13: a family that the machine does not support at first, and supports later.
func TestFamilyAppears(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		name := "ip6tables-" + string(l.backend)
		working := l.tools(map[string]string{name + "-save": noIPv6, name + "-restore": noIPv6})
		c := l.apply(quick)
		if level := c.Levels()[family.IPv6]; level != iptables.LevelUnavailable {
			l.t.Errorf("level %s", level)
		}
		l.keep(c)
		working()
		wait.Until(l.t, "IPv6 is captured", func() bool { return c.Levels()[family.IPv6] == iptables.LevelComplete })
		l.complete(c)
		if n := c.Stats().Failures; n != 0 {
			l.t.Errorf("%d failures", n)
		}
	})
}

// K4, K13: a backend that cannot be read for a moment does not count as unsupported.
func TestUnreadableBackend(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		broken := "echo 'Cannot allocate memory' >&2; exit 4"
		working := l.tools(map[string]string{"iptables-nft-save": broken, "ip6tables-nft-save": broken})
		c := l.capture(auto)
		if err := c.Apply(l.t.Context()); err == nil || !strings.Contains(err.Error(), "backend nft") {
			l.t.Errorf("apply: %v", err)
		}
		working()
		if got := l.holders(); got != "" {
			l.t.Errorf("rules in %s", got)
		}
	})
}

// K3, K4: rules that cannot be read do not count as removed.
func TestRemoveUnseen(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.apply(func(c *iptables.Config) { c.Backend = iptables.Legacy })
		denied := `echo "Failed to list table names in /proc/net/ip_tables_names: Permission denied" >&2; exit 1`
		working := l.tools(map[string]string{"iptables-legacy-save": denied, "ip6tables-legacy-save": denied})
		if err := l.capture(auto).Remove(l.t.Context()); !errors.Is(err, iptables.ErrUnseen) || !strings.Contains(err.Error(), "legacy") {
			l.t.Errorf("remove: %v", err)
		}
		working()
		if got := l.holders(); got != inLegacy {
			l.t.Errorf("rules in %q, want %q", got, inLegacy)
		}
		remove(l.t, l.capture(auto))
		if got := l.holders(); got != "" {
			l.t.Errorf("rules in %s", got)
		}
	})
}

// K10: while no rule changes, no program is run, however many rules other programs have.
func TestQuietReconcile(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		var foreign strings.Builder
		foreign.WriteString("*nat\n:OTHERS - [0:0]\n")
		for n := range 20_000 {
			fmt.Fprintf(&foreign, "-A OTHERS -d 10.%d.%d.1/32 -p tcp -m tcp --dport 80 -j ACCEPT\n", n>>8, n&0xff)
		}
		foreign.WriteString("COMMIT\n")
		l.ns.Pipe(foreign.String(), "iptables-"+string(l.backend)+"-restore", "--noflush", "-w", "5")
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
		c := l.apply(quick)
		l.keep(c)
		count := func() int {
			text, err := os.ReadFile(runs)
			if err != nil {
				t.Fatal(err)
			}
			return len(text)
		}
		looks := func(more uint64) {
			checks := c.Stats().Checks + more
			wait.Until(t, "more looks", func() bool { return c.Stats().Checks >= checks })
		}
		looks(5)
		before, start := count(), time.Now()
		looks(10)
		if n := count(); n != before {
			t.Errorf("%d programs were run in %v", n-before, time.Since(start))
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
	labs(t, all(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(func(c *iptables.Config) { c.Interval = 2 * time.Second })
		save := l.pick("iptables-", "ip6tables-") + string(l.backend)
		rules := l.sh("%s-save -t nat", save)
		l.keep(c)
		conn := l.socket()
		l.wantOn(conn, "AU")
		stuck := l.socket()
		l.sh("%s -w 5 -t nat -D OUTPUT 1; %[1]s -w 5 -t nat -D OUTPUT 1", save)
		l.wantOn(stuck, "U")
		l.ns.Pipe(rules, save+"-restore", "-w", "5")
		wait.Until(t, "the socket is captured", func() bool {
			reply, err := askOn(stuck, "2s")
			return err == nil && reply == "2sAU"
		})
		l.wantOn(conn, "AU")
		t.Logf("%d repairs", c.Stats().Repairs) // none, unless a check fell into that moment
	})
}

// K10: a reply that arrives after the entry of its query was dropped makes an entry of its own.
// That one is dropped too, or the socket would stay on its old path.
func TestDropWithReplyInFlight(t *testing.T) {
	t.Parallel()
	for _, zone := range []uint16{53, 0} {
		t.Run(map[uint16]string{53: "zone", 0: "no zone"}[zone], func(t *testing.T) {
			t.Parallel()
			labs(t, diagonal(), func(l *lab) {
				t := l.t
				l.agent()
				c := l.apply(quick, func(c *iptables.Config) { c.Zone, c.Settle = zone, time.Minute })
				conn := l.socket()
				l.sh("%s%s -w 5 -t nat -F OUTPUT", l.pick("iptables-", "ip6tables-"), l.backend)
				l.askHeld(conn)
				l.keep(c)
				wait.Until(t, "the rules are repaired", func() bool { return c.Stats().Repairs == 1 })
				l.wantHeld(conn, "U")
				wait.Until(t, "the socket is captured", func() bool {
					reply, err := askOn(conn, "2s")
					return err == nil && reply == "2sAU"
				})
			})
		})
	}
}

// K13: what the kernel does not support is tried again ever more rarely, because each attempt interrupts the capture.
func TestWithoutTable(t *testing.T) {
	t.Parallel()
	labs(t, []kind{{iptables.NFT, family.IPv4}}, func(l *lab) {
		t := l.t
		runs, scripts := filepath.Join(t.TempDir(), "runs"), map[string]string{}
		for _, family := range []string{"iptables", "ip6tables"} {
			name := fmt.Sprintf("%s-%s-restore", family, l.backend)
			scripts[name] = fmt.Sprintf(`case $(tee %[1]s.%[2]s) in *"*raw"*)
	echo x >>%[1]s
	sed '/^\*raw/,$d' %[1]s.%[2]s | %[3]s "$@"
	echo "%[2]s: can't initialize iptables table raw: Table does not exist (do you need to insmod?)" >&2
	exit 3
esac
exec %[3]s "$@" <%[1]s.%[2]s
`, runs, name, tool(t, name))
		}
		l.tools(scripts)
		attempts := func() int { return strings.Count(l.sh("cat %s", runs), "x") }
		rare := func(c *iptables.Config) { c.Interval = time.Hour }
		c := l.capture(leased, rare)
		l.set(c, true, l.config(leased, rare))
		l.keep(c)
		<-c.Begun()
		first := attempts()
		for range 2 {
			checks := c.Stats().Checks
			l.sh("nft add table inet site; nft delete table inet site")
			wait.Until(t, "the rules are checked", func() bool { return c.Stats().Checks > checks })
		}
		if n := attempts() - first; n > 0 {
			t.Errorf("the table was written %d times at first, and %d times since", first, n)
		}
		if level := c.Levels()[l.family]; level != iptables.LevelReduced {
			t.Errorf("level %s", level)
		}
	})
}
