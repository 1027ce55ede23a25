package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// keep runs Keep until the test ends.
func (l *lab) keep(c *iptables.Capture) {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	var loop sync.WaitGroup
	loop.Go(func() {
		l.ns.Run(func() {
			if err := c.Keep(ctx); err != nil {
				l.t.Errorf("keep: %v", err)
			}
		})
	})
	l.t.Cleanup(func() { cancel(); loop.Wait() })
}

func quick(c *iptables.Config) { c.Interval = 100 * time.Millisecond }

// impatient is a change of the configuration for tools that hang and removals that fail.
func impatient(c *iptables.Config) { c.Patience = 3 * time.Second }

// K10: Apply returns when the rules are installed, even if that takes longer than the time between
// two checks.
func TestApplyChecksNothing(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		c := l.apply(func(c *iptables.Config) { c.Interval = time.Nanosecond })
		if n := c.Stats().Checks; n > 0 {
			l.t.Errorf("%d checks", n)
		}
	})
}

// K10
func TestDrift(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(quick)
		l.keep(c)
		conn := l.socket()
		l.wantOn(conn, "AU")
		good := l.saves()
		ipt := l.pick("iptables-", "ip6tables-") + string(l.backend) + " -w 5"
		rules, err := iptables.Build(l.config())
		if err != nil {
			t.Fatal(err)
		}
		restore := func(backend iptables.Backend, text string) string {
			return fmt.Sprintf("%s%s-restore --noflush -w 5 <<'.'\n%s.", l.pick("iptables-", "ip6tables-"), backend, text)
		}
		for what, script := range map[string]string{
			"flushed":         ipt + " -t nat -F NAMETAP_OUTPUT",
			"all flushed":     ipt + " -t nat -F",
			"zone flushed":    ipt + " -t raw -F",
			"jump gone":       ipt + " -t nat -D OUTPUT 2",
			"rule gone":       ipt + " -t nat -D NAMETAP_OUTPUT 3",
			"rule added":      ipt + " -t nat -I NAMETAP_OUTPUT 1 -j RETURN",
			"reordered":       restore(l.backend, "*nat\n-D NAMETAP_OUTPUT 1\n-A NAMETAP_OUTPUT -m owner --uid-owner 1337 -j RETURN\nCOMMIT\n"),
			"jump twice":      ipt + " -t raw -A OUTPUT -j NAMETAP_OUTPUT",
			"before our jump": ipt + " -t nat -I OUTPUT 1 -p udp --dport 53 -j ACCEPT",
			"other backend":   restore(l.other(), rules.Text(l.family)),
		} {
			repairs := c.Stats().Repairs
			lines := l.log.Count("had drifted")
			l.sh("%s", script)
			start := time.Now()
			stray := l.socket()
			_, _ = askOn(stray, "2d") // a flow that may start past the agent
			wait.Until(t, what+" is repaired", func() bool { return c.Stats().Repairs == repairs+1 })
			t.Logf("%s: repaired after %v", what, time.Since(start))
			l.want("AU")
			l.wantOn(conn, "AU")
			l.wantOn(stray, "AU")
			if n := l.log.Count("had drifted"); n != lines+1 {
				t.Errorf("%s: %d lines in the log, want one:\n%s", what, n-lines, l.log)
			}
			if what == "before our jump" {
				l.sh("%s -t nat -D OUTPUT -p udp --dport 53 -j ACCEPT", ipt)
			}
			if got := l.saves(); withoutEmpty(got) != withoutEmpty(good) {
				t.Errorf("%s: repaired to\n%s\nwant\n%s", what, got, good)
			}
		}
		repairs := c.Stats().Repairs
		checks := c.Stats().Checks
		wait.Until(t, "more looks", func() bool { return c.Stats().Checks > checks+2 })
		if n := c.Stats().Repairs; n != repairs {
			t.Errorf("%d repairs without drift", n-repairs)
		}
	})
}

// withoutEmpty removes the chains that a table in legacy keeps forever.
func withoutEmpty(save string) string {
	var b strings.Builder
	for line := range strings.Lines(save) {
		if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, "==") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// set changes the desired state of a Capture.
func (l *lab) set(c *iptables.Capture, on bool, cfg iptables.Config) {
	l.t.Helper()
	if err := c.Set(iptables.Desired{On: on, Because: "of the test", Config: cfg}); err != nil {
		l.t.Fatal(err)
	}
}

// K10: nothing happens before the first desired value, rules that could not be installed
// are installed later, and no rules are repaired while capture is off.
func TestKeepAndSwitch(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := l.config(quick, impatient)
		c := l.with(cfg)
		l.keep(c)
		<-c.Begun()
		if got := l.holders(); got != "" || c.Stats().Checks != 0 {
			t.Errorf("nothing is desired: rules in %q, %+v", got, c.Stats())
		}
		broken := map[string]string{}
		for _, family := range []string{"iptables-", "ip6tables-"} {
			broken[family+string(backend)+"-restore"] = "echo broken >&2; exit 2"
		}
		working := l.tools(broken)
		l.set(c, true, cfg)
		wait.Until(t, "failures are counted", func() bool { return c.Stats().Failures > 2 })
		if n := l.log.Count("cannot be checked or repaired"); n != 1 || c.Captured() {
			t.Errorf("one failure is logged %d times, captured %v", n, c.Captured())
		}
		l.set(c, false, cfg)
		wait.Until(t, "capture is off", func() bool { return l.log.Count("DNS capture is off") == 1 })
		l.set(c, true, cfg)
		wait.Until(t, "the failure is logged again", func() bool { return l.log.Count("cannot be checked or repaired") == 2 })
		working()
		wait.Until(t, "the rules are in", func() bool { return c.Captured() && c.Stats().Checks > 2 })
		if n := l.log.Count("DNS is captured"); l.holders() == "" || n != 1 || c.Stats().Repairs != 0 {
			t.Errorf("rules in %q, logged %d times, %+v", l.holders(), n, c.Stats())
		}
		l.set(c, false, cfg)
		wait.Until(t, "the rules are removed", func() bool { return !c.Captured() })
		if got := l.holders(); got != "" || l.log.Count("DNS capture is off") != 2 || l.log.Count("DNS is no longer captured") != 1 {
			t.Errorf("rules in %q\n%s", got, l.log)
		}
		checks := c.Stats().Checks
		l.set(c, true, cfg)
		wait.Until(t, "the rules are checked again", func() bool { return c.Stats().Checks > checks })
		if got := l.holders(); got == "" {
			t.Errorf("rules in %q", got)
		}
	})
}

// startKeep starts Keep, and returns a function that ends it and returns its error.
func (l *lab) startKeep(c *iptables.Capture) (end func() error) {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	done := make(chan error, 1)
	go l.ns.Run(func() { done <- c.Keep(ctx) })
	return func() error {
		cancel()
		return <-done
	}
}

// K9: if Keep ends while it installs rules, it removes them and reports no family as missing.
func TestKeepEndsInApply(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		working := l.tools(map[string]string{"ip6tables-" + string(l.backend) + "-restore": "exec sleep 60"})
		cfg := l.config(func(c *iptables.Config) { c.FailClosed = false })
		c := l.with(cfg)
		l.set(c, true, cfg)
		end := l.startKeep(c)
		wait.Until(t, "IPv4 has rules", func() bool { return l.holders() != "" })
		working()
		if err := end(); err != nil || l.holders() != "" || l.log.Count("level=WARN") != 0 {
			t.Errorf("%v, rules in %q\n%s", err, l.holders(), l.log)
		}
	})
}

// K9: when Keep ends, it removes the rules unless they must stay. A removal that has begun
// is finished in either case.
func TestKeepEnds(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		for _, closed := range []bool{false, true} {
			cfg := l.config(func(c *iptables.Config) { c.FailClosed = closed })
			c := l.with(cfg)
			l.set(c, true, cfg)
			end := l.startKeep(c)
			<-c.Begun()
			if got := l.holders(); got == "" || !c.Captured() {
				t.Errorf("Keep has begun: rules in %q", got)
			}
			if err := end(); err != nil {
				t.Error(err)
			}
			if got := l.holders(); (got != "") != closed || c.Captured() != closed {
				t.Errorf("fail closed is %v: rules in %q", closed, got)
			}
		}
		cfg := l.config(func(c *iptables.Config) { c.Settle = time.Minute })
		c := l.with(cfg)
		l.set(c, false, cfg)
		end := l.startKeep(c)
		<-c.Begun()
		if err := end(); err != nil {
			t.Error(err)
		}
		if got := l.holders(); got != "" {
			t.Errorf("capture is off: rules in %q", got)
		}
	})
}

// K9: if the first rules cannot be installed, Keep ends without rules.
func TestKeepRefused(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.failing("ip6tables", "*")
		cfg := l.config(func(c *iptables.Config) { c.Only = family.IPv6 })
		c := l.with(cfg)
		l.set(c, true, cfg)
		err := c.Keep(t.Context())
		if err == nil || !strings.Contains(err.Error(), "capturing DNS: ") {
			t.Errorf("keep: %v", err)
		}
		if got := l.holders(); got != "" {
			t.Errorf("rules in %q", got)
		}
		select {
		case <-c.Begun():
			t.Error("it has begun")
		default:
		}
	})
}

// K2, K9: if capture is switched on again while replies may be in flight, the existing
// rules are used.
func TestRemovalInterrupted(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		cfg := l.config(quick, func(c *iptables.Config) { c.Settle = time.Hour })
		c := l.with(cfg)
		l.set(c, true, cfg)
		l.keep(c)
		<-c.Begun()
		conn := l.socket()
		l.wantOn(conn, "AU")
		l.set(c, false, cfg)
		wait.Until(t, "DNS is no longer captured", func() bool { return l.log.Count("DNS is no longer captured") == 1 })
		l.want("U")
		if got := l.holders(); got == "" || !c.Captured() {
			t.Errorf("replies may be in flight: rules in %q", got)
		}
		checks := c.Stats().Checks
		l.set(c, true, cfg)
		wait.Until(t, "the rules are checked", func() bool { return c.Stats().Checks > checks })
		l.want("AU")
		l.wantOn(conn, "AU")
		l.complete(c)
		if c.Remaining() != "" || c.Stats().Repairs != 0 {
			t.Errorf("remaining %q, %+v", c.Remaining(), c.Stats())
		}
	})
}

// K13: a removal that fails is reported, and continues when it can.
func TestRemovalFails(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		cfg := l.config(quick)
		c := l.with(cfg)
		l.set(c, true, cfg)
		l.keep(c)
		<-c.Begun()
		denied := map[string]string{}
		for _, family := range []string{"iptables-", "ip6tables-"} {
			denied[family+string(l.backend)+"-save"] = `echo "Permission denied" >&2; exit 1`
		}
		working := l.tools(denied)
		l.set(c, false, cfg)
		wait.Until(t, "the failure is reported", func() bool { return c.Remaining() != "" && l.log.Count("cannot be removed") == 1 })
		if !c.Captured() {
			t.Error("it is not captured any more")
		}
		working()
		l.set(c, true, cfg)
		wait.Until(t, "the rules are in", func() bool { return c.Remaining() == "" })
		l.set(c, false, cfg)
		wait.Until(t, "the rules are removed", func() bool { return !c.Captured() })
		if got := l.holders(); got != "" {
			t.Errorf("rules in %q", got)
		}
	})
}
