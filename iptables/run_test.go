package iptables_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/iptables"
)

// keep runs the loop until the test ends.
func keep(t *testing.T, c *iptables.Capture) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

func quick(c *iptables.Config) { c.Interval = 100 * time.Millisecond }

// K10
func TestDrift(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		l.agent()
		c := l.capture(quick)
		keep(t, c)
		conn := l.socket()
		l.wantOn(conn, "AU")
		good := saves(t)
		ipt := l.pick("iptables-", "ip6tables-") + string(l.backend)
		other := "legacy"
		if l.backend == iptables.Legacy {
			other = "nft"
		}
		rules, err := iptables.Build(l.config())
		if err != nil {
			t.Fatal(err)
		}
		second := l.pick("iptables-", "ip6tables-") + other + "-restore --noflush <<'.'\n" + rules.Text(l.family) + "."
		for what, script := range map[string]string{
			"flushed":         ipt + " -t nat -F NAMETAP_OUTPUT",
			"all flushed":     ipt + " -t nat -F",
			"zone flushed":    ipt + " -t raw -F",
			"jump gone":       ipt + " -t nat -D OUTPUT 2",
			"rule gone":       ipt + " -t nat -D NAMETAP_OUTPUT 3",
			"rule added":      ipt + " -t nat -I NAMETAP_OUTPUT 1 -j RETURN",
			"reordered":       ipt + " -t nat -D NAMETAP_OUTPUT 1; " + ipt + " -t nat -A NAMETAP_OUTPUT -m owner --uid-owner 1337 -j RETURN",
			"jump twice":      ipt + " -t raw -A OUTPUT -j NAMETAP_OUTPUT",
			"before our jump": ipt + " -t nat -I OUTPUT 1 -p udp --dport 53 -j ACCEPT",
			"other backend":   second,
		} {
			repairs := c.Stats().Repairs
			lines := l.log.count("have drifted") + l.log.count("had drifted")
			sh(t, "%s", script)
			start := time.Now()
			_, _ = askOn(conn, "2d") // a flow that may take the wrong way
			eventually(t, what+" is mended", func() bool { return c.Stats().Repairs == repairs+1 })
			t.Logf("%s: mended after %v", what, time.Since(start))
			l.want("AU")
			l.wantOn(conn, "AU")
			if n := l.log.count("had drifted"); n != lines+1 {
				t.Errorf("%s: %d lines in the log, want one:\n%s", what, n-lines, l.log)
			}
			if strings.Contains(script, "-j ACCEPT") {
				sh(t, "%s -t nat -D OUTPUT -p udp --dport 53 -j ACCEPT", ipt)
			}
			got := saves(t)
			if what == "other backend" { // tables of the other backend were made by this test
				got = withoutEmpty(got)
			}
			if withoutEmpty(got) != withoutEmpty(good) {
				t.Errorf("%s: mended to\n%s\nwant\n%s", what, got, good)
			}
		}
		repairs := c.Stats().Repairs
		checks := c.Stats().Checks
		eventually(t, "more looks", func() bool { return c.Stats().Checks > checks+2 })
		if n := c.Stats().Repairs; n != repairs {
			t.Errorf("%d repairs with nothing to mend", n-repairs)
		}
	})
}

// withoutEmpty leaves out what a legacy table that was made has for ever.
func withoutEmpty(save string) string {
	var b strings.Builder
	for line := range strings.Lines(save) {
		if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, "==") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// K10: nothing is kept before Apply and after Remove, and Apply that failed is
// made up for.
func TestRunAndSwitch(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		quick(&cfg)
		log := new(logBuffer)
		c := newCapture(t, cfg, log)
		keep(t, c)
		time.Sleep(3 * cfg.Interval)
		if got := holders(t); got != "" || c.Stats().Checks != 0 {
			t.Errorf("before Apply: rules in %q, %+v", got, c.Stats())
		}
		broken := map[string]string{}
		for _, family := range []string{"iptables-", "ip6tables-"} {
			broken[family+string(backend)+"-restore"] = "echo broken >&2; exit 2"
		}
		working := pathWithout(t, broken)
		if err := c.Apply(t.Context()); err == nil {
			t.Error("no error of a broken tool")
		}
		eventually(t, "failures are counted", func() bool { return c.Stats().Failures > 2 })
		if n := log.count("cannot be kept"); n != 1 {
			t.Errorf("one failure is said %d times", n)
		}
		working()
		eventually(t, "rules are in", func() bool { return holders(t) != "" && c.Stats().Repairs == 1 })
		remove(t, c)
		checks := c.Stats().Checks
		time.Sleep(3 * cfg.Interval)
		if got := holders(t); got != "" || c.Stats().Checks != checks {
			t.Errorf("after Remove: rules in %q", got)
		}
	})
}
