package iptables_test

import (
	"context"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// V1, V4: at the end of Keep, Leave leaves the rules unchanged for the next Keep, which takes them
// over, and Soon removes them without the settle time. Leave leaves nothing while capture is off.
func TestEndings(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.connect()
		before := l.saves()
		cfg := l.config()
		cfg.Settle, cfg.FailClosed = time.Hour, false
		end := func(ending iptables.Ending, on bool) time.Duration {
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
			began := time.Now()
			cancel()
			if err := wait.For(t, "Keep ends", ended); err != nil {
				t.Error(err)
			}
			return time.Since(began)
		}
		end(iptables.Leave, true)
		rules := l.saves()
		if withoutEmpty(rules) == withoutEmpty(before) {
			t.Error("Leave has removed the rules")
		}
		end(iptables.Leave, true)
		if got := l.saves(); got != rules {
			t.Errorf("the next Keep has changed the rules:\n%s\nbefore:\n%s", got, rules)
		}
		if took := end(iptables.Soon, true); took > wait.Limit/2 {
			t.Errorf("Soon took %v", took)
		}
		if got := l.saves(); withoutEmpty(got) != withoutEmpty(before) {
			t.Errorf("Soon leaves\n%s", got)
		}
		end(iptables.Leave, true)
		cfg.Settle = 0
		end(iptables.Leave, false)
		if got := l.saves(); withoutEmpty(got) != withoutEmpty(before) {
			t.Errorf("Leave, while capture is off, leaves\n%s", got)
		}
	})
}
