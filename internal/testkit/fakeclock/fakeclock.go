// Package fakeclock provides a clock for tests that passes suspends of the machine without
// waiting for them.
package fakeclock

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A Clock is a clock of a machine that sleeps when a test says so. Make one with [New].
type Clock struct {
	*clock.Clock
	asleep *atomic.Int64
}

// New returns a clock.
func New() *Clock {
	asleep := new(atomic.Int64)
	return &Clock{
		Clock:  clock.From(func() time.Duration { return time.Duration(asleep.Load()) }),
		asleep: asleep,
	}
}

// Suspend passes a suspend of that length: the clock is advanced, while time.Now and timers are
// not. It returns when the clock shows it.
func (c *Clock) Suspend(tb testing.TB, length time.Duration) {
	tb.Helper()
	c.asleep.Add(int64(length))
	wait.Until(tb, "the clock shows the suspend", func() bool { return c.Slept() >= time.Duration(c.asleep.Load()) })
}
