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

// K10: rules that could not be installed are installed later. The failure is logged each time that capture is switched on.
func TestKeepAndSwitch(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.backend = iptables.NFT
		cfg := l.config(quick)
		c := l.with(cfg)
		l.keep(c)
		<-c.Begun()
		broken := []func(){l.failing("iptables", "*", refused), l.failing("ip6tables", "*", refused)}
		for n := 1; n <= 2; n++ {
			l.set(c, true, cfg)
			wait.Until(t, "the failure is logged", func() bool { return l.log.Count("cannot be checked or repaired") == n })
			l.set(c, false, cfg)
			wait.Until(t, "capture is off", func() bool { return l.log.Count("DNS capture is off") == n })
		}
		l.set(c, true, cfg)
		for _, working := range broken {
			working()
		}
		wait.Until(t, "the rules are in", c.Captured)
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
