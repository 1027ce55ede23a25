// Package clock tells the time that has passed, also while the machine was suspended.
//
// Go's monotonic time is CLOCK_MONOTONIC, which stands still during a suspend. A cached reply
// would keep its TTL overnight. CLOCK_BOOTTIME counts the suspend, and like CLOCK_MONOTONIC it
// ignores jumps of the wall clock, but Go reads it with a system call only, which takes as long as
// the lookup in the cache (BenchmarkNow). A [Clock] reads it at most every 10 ms and adds the
// time asleep to Go's time. All that polls does so at the ticks of one clock ([Clock.Poll]).
//
//	clock.go  the Clock
//	ticks.go  its ticks, and what polls at them
//	alarm.go  the timer of the ticks: of the kernel, or of Go
//
// Which clock measures what:
//
//   - The age of something that others change meanwhile: a [Clock]. These are TTLs and
//     staleness of replies, the age of the table, and the age of sockets to nameservers.
//   - How long something has not answered, and how long to wait for it: time.Now and timers, which
//     stop while the machine sleeps. That time does not count as a nameserver's delay, and the
//     clients on this machine did not wait during it.
//   - When a certificate or a token expires, and the time of a push in the snapshot file, which
//     is compared after a reboot: the wall clock.
package clock

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// readEvery is how long the time asleep is used after it was read: the first queries after a
// suspend of a busy machine may still see the time of before.
const readEvery = 10 * time.Millisecond

// A Clock tells the time including suspends. It is safe for concurrent use.
type Clock struct {
	origin time.Time
	asleep func() time.Duration
	before time.Duration // time asleep before origin

	// Times since origin, in nanoseconds.
	slept atomic.Int64 // time asleep, of which before is no part; never decreases
	read  atomic.Int64 // when slept was read, on CLOCK_MONOTONIC

	ticks ticks
}

// New returns a clock. Its time begins at time.Now.
func New() *Clock { return From(timeAsleep) }

// ForPolling returns a clock like New with another length of its ticks, which come from a timer of the kernel,
// if there can be one. It must not be used in a bubble of testing/synctest.
func ForPolling(tick time.Duration) *Clock {
	c := New()
	c.ticks.length, c.ticks.kernel = tick, true
	return c
}

// From returns a clock with another source of the time asleep, for tests. asleep returns how
// long the machine has been suspended since some time in the past.
func From(asleep func() time.Duration) *Clock {
	now := time.Now()
	return &Clock{origin: now, asleep: asleep, before: asleep(), ticks: ticks{origin: now, length: Tick}}
}

// Now returns a time to compare with others of this clock. Their differences include the time
// for which the machine was suspended, and jumps of the wall clock have no effect on them.
func (c *Clock) Now() time.Time {
	now := time.Now()
	return now.Add(c.sleptAt(now))
}

// Since returns the time since t on this clock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Slept returns for how long the machine was suspended since the clock was made.
func (c *Clock) Slept() time.Duration { return c.sleptAt(time.Now()) }

func (c *Clock) sleptAt(now time.Time) time.Duration {
	since, last := int64(now.Sub(c.origin)), c.read.Load()
	if since-last < int64(readEvery) || !c.read.CompareAndSwap(last, since) {
		return time.Duration(c.slept.Load())
	}
	slept := int64(c.asleep() - c.before)
	for {
		old := c.slept.Load()
		if slept <= old {
			return time.Duration(old)
		}
		if c.slept.CompareAndSwap(old, slept) {
			return time.Duration(slept)
		}
	}
}

// Poll calls look at ticks of the clock, as often as every says or, if that is no multiple of a tick, a bit
// more often. It sends to found, which has a buffer, when look returns true, until stop is called. look must be quick,
// because all polls of the clock take turns: one that waits for a disk keeps the others waiting.
// It is not called after stop has returned, and must not call stop.
func (c *Clock) Poll(every time.Duration, look func() bool) (found <-chan struct{}, stop func()) {
	p := c.ticks.add(every, look)
	return p.found, func() { c.ticks.remove(p) }
}

// Await calls look like [Clock.Poll], and returns true when look returns true, and false when ctx ends before.
func (c *Clock) Await(ctx context.Context, every time.Duration, look func() bool) bool {
	found, stop := c.Poll(every, look)
	defer stop()
	select {
	case <-found:
		return true
	case <-ctx.Done():
		return false
	}
}

// timeAsleep returns how long the machine has been suspended since it was booted, or less by
// the time that passes between the two readings. It is 0 if the kernel has no such clock.
func timeAsleep() time.Duration {
	var boot, awake unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil {
		return 0
	}
	return time.Duration(boot.Nano() - awake.Nano())
}

// BackOff returns how long to wait after the nth failure in a row, counted from 0: first, doubled with each failure,
// at most longest.
func BackOff(n int, first, longest time.Duration) time.Duration {
	for ; n > 0 && first < longest; n-- {
		first *= 2
	}
	return min(first, longest)
}

// Sleep waits for some time, and returns false if ctx ends before.
func Sleep(ctx context.Context, length time.Duration) bool {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
