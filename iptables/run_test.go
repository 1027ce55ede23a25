package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// keep runs the loop until the test ends.
func (l *lab) keep(c *iptables.Capture) {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	var loop sync.WaitGroup
	loop.Go(func() {
		l.ns.Run(func() {
			if err := c.Run(ctx); err != nil {
				l.t.Errorf("run: %v", err)
			}
		})
	})
	l.t.Cleanup(func() { cancel(); loop.Wait() })
}

func quick(c *iptables.Config) { c.Interval = 100 * time.Millisecond }

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
			_, _ = askOn(stray, "2d") // a flow that may begin the wrong way
			wait.Until(t, what+" is mended", func() bool { return c.Stats().Repairs == repairs+1 })
			t.Logf("%s: mended after %v", what, time.Since(start))
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
				t.Errorf("%s: mended to\n%s\nwant\n%s", what, got, good)
			}
		}
		repairs := c.Stats().Repairs
		checks := c.Stats().Checks
		wait.Until(t, "more looks", func() bool { return c.Stats().Checks > checks+2 })
		if n := c.Stats().Repairs; n != repairs {
			t.Errorf("%d repairs with nothing to mend", n-repairs)
		}
	})
}

// withoutEmpty leaves out what a table that was made in legacy has for ever.
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
		cfg := l.config()
		quick(&cfg)
		c := l.with(cfg)
		l.keep(c)
		time.Sleep(3 * cfg.Interval) //nolint:forbidigo // Run would look at the rules in this time, and must not
		if got := l.holders(); got != "" || c.Stats().Checks != 0 {
			t.Errorf("before Apply: rules in %q, %+v", got, c.Stats())
		}
		broken := map[string]string{}
		for _, family := range []string{"iptables-", "ip6tables-"} {
			broken[family+string(backend)+"-restore"] = "echo broken >&2; exit 2"
		}
		working := tools(t, broken)
		if err := c.Apply(t.Context()); err == nil {
			t.Error("no error of a broken tool")
		}
		wait.Until(t, "failures are counted", func() bool { return c.Stats().Failures > 2 })
		if n := l.log.Count("cannot be kept"); n != 1 {
			t.Errorf("one failure is said %d times", n)
		}
		working()
		wait.Until(t, "rules are in", func() bool { return l.holders() != "" && c.Stats().Repairs == 1 })
		remove(t, c)
		checks := c.Stats().Checks
		time.Sleep(3 * cfg.Interval) //nolint:forbidigo // Run would look at the rules in this time, and must not
		if got := l.holders(); got != "" || c.Stats().Checks != checks {
			t.Errorf("after Remove: rules in %q", got)
		}
	})
}
