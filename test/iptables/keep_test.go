package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
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

// busy makes a Capture check every interval until the test ends, because it has yet to sweep.
func busy(c *iptables.Config) {
	quick(c)
	c.Settle = time.Hour
}

// K10
func TestDrift(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(busy)
		l.keep(c)
		conn := l.socket()
		l.wantOn(conn, "AU")
		good := l.saves()
		ipt := l.tool("") + " -w 5"
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
		} {
			repairs := c.Stats().Repairs
			lines := l.log.Count("had drifted")
			l.sh("%s", script)
			stray := l.socket()
			_, _ = askOn(stray, "2d") // a flow that may start past the agent
			wait.Until(t, what+" is repaired", func() bool { return c.Stats().Repairs == repairs+1 })
			l.want("AU")
			l.wantOn(conn, "AU")
			l.wantOn(stray, "AU")
			if n := l.log.Count("had drifted"); n != lines+1 {
				t.Errorf("%s: %d lines in the log, want one:\n%s", what, n-lines, l.log)
			}
			if what == "before our jump" {
				l.sh("%s -t nat -D OUTPUT -p udp --dport 53 -j ACCEPT", ipt)
			}
			if got := l.saves(); got != good {
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
		t := l.t
		cfg := l.config(quick)
		c := l.with(cfg)
		l.keep(c)
		<-c.Begun()
		if got := l.holders(); got != "" || c.Stats().Checks != 0 {
			t.Errorf("nothing is desired: rules in %q, %+v", got, c.Stats())
		}
		broken := []func(){l.failing("iptables", "*", refused), l.failing("ip6tables", "*", refused)}
		l.set(c, true, cfg)
		wait.Until(t, "failures are counted", func() bool { return c.Stats().Failures > 2 })
		if n := l.log.Count("cannot be checked or repaired"); n != 1 || c.Captured() {
			t.Errorf("one failure is logged %d times, captured %v", n, c.Captured())
		}
		l.set(c, false, cfg)
		wait.Until(t, "capture is off", func() bool { return l.log.Count("DNS capture is off") == 1 })
		l.set(c, true, cfg)
		wait.Until(t, "the failure is logged again", func() bool { return l.log.Count("cannot be checked or repaired") == 2 })
		for _, working := range broken {
			working()
		}
		wait.Until(t, "the rules are in", func() bool { return c.Captured() && c.Stats().Checks > 0 })
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

// V1, V4, K9: rules of FailClosed stay at the end of Keep. Otherwise Leave leaves the rules unchanged for the next Keep, which takes them
// over, and Soon removes them without the settle time. Leave leaves nothing while capture is off.
func TestEndings(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.connect()
		before := l.saves()
		cfg := l.config()
		cfg.Settle, cfg.FailClosed = time.Hour, false
		end := func(ending iptables.Ending, on bool) {
			t.Helper()
			c := l.with(cfg)
			l.set(c, on, cfg)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go l.ns.Run(func() { ended <- c.Keep(ctx) })
			wait.For(t, "the first state is reached", c.Begun())
			if on {
				_, _ = askOn(l.socket(), "2d") // a captured query, so that a removal settles
			}
			c.SetEnding(ending)
			cancel()
			if err := wait.For(t, "Keep ends", ended); err != nil {
				t.Error(err)
			}
		}
		end(iptables.Leave, true)
		rules := l.saves()
		if rules == before {
			t.Error("Leave has removed the rules")
		}
		end(iptables.Leave, true)
		if got := l.saves(); got != rules {
			t.Errorf("the next Keep has changed the rules:\n%s\nbefore:\n%s", got, rules)
		}
		end(iptables.Soon, true)
		if got := l.saves(); got != before {
			t.Errorf("Soon leaves\n%s", got)
		}
		cfg.FailClosed = true
		end(iptables.Settle, true)
		if got := l.saves(); got != rules {
			t.Errorf("FailClosed changes the rules:\n%s", got)
		}
		cfg.Settle, cfg.FailClosed = 0, false
		end(iptables.Leave, false)
		if got := l.saves(); got != before {
			t.Errorf("Leave, while capture is off, leaves\n%s", got)
		}
	})
}

// K2: while other settings replace the rules, no query takes another way.
func TestReplaceUnderTraffic(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		l.agent()
		c := l.apply()
		conn, replaced := l.socket(), make(chan error, 1)
		var asked atomic.Int32
		go l.ns.Run(func() {
			var err error
			for uid := uint32(5000); err == nil && (uid < 5005 || asked.Load() < 20); uid++ {
				err = applyOther(l.t.Context(), c, l.config(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{uid} }))
			}
			replaced <- err
		})
		for len(replaced) == 0 {
			l.want("AU")
			l.wantOn(conn, "AU")
			asked.Add(1)
		}
		if err := <-replaced; err != nil {
			l.t.Error(err)
		}
	})
}

// K13: the rules of table filter are installed once another program has removed the rules that iptables cannot read.
func TestFilterReadAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, kind{iptables.NFT, family.IPv4})
	l.ns.Run(func() {
		l.sh("nft 'add table ip filter; add chain ip filter mine; add rule ip filter mine numgen inc mod 2 0 accept'")
		l.keep(l.apply(quick))
		if l.log.Count("leave out") != 1 || l.log.Count("complete now") != 0 {
			t.Errorf("the log:\n%s", l.log)
		}
		l.sh("nft flush chain ip filter mine")
		wait.Until(t, "the rules are complete", func() bool {
			return l.log.Count("complete now") == 1 && strings.Contains(l.sh("iptables-nft-save -t filter"), "NAMETAP_INPUT")
		})
	})
}
