// Package fakeclock has a clock for tests that simulates suspends of the machine, without
// waiting for their length.
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

// Suspend simulates a suspend of a length: it advances the clock, but neither time.Now nor
// timers. It returns when the clock shows the suspend.
func (c *Clock) Suspend(tb testing.TB, length time.Duration) {
	tb.Helper()
	c.asleep.Add(int64(length))
	wait.Until(tb, "the clock shows the suspend", func() bool { return c.Slept() >= time.Duration(c.asleep.Load()) })
}
