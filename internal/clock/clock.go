// Package clock measures time, including the time for which the machine was suspended.
//
// Go's monotonic time is CLOCK_MONOTONIC, which stands still during a suspend: with it, a cached reply
// would keep its TTL overnight. CLOCK_BOOTTIME counts the suspend, and like CLOCK_MONOTONIC it
// ignores jumps of the wall clock. But Go can read CLOCK_BOOTTIME only with a system call, which takes as long as
// a lookup in the cache. So a [Clock] reads CLOCK_BOOTTIME at most every 10 ms, to find out how
// long the machine was asleep (suspended), and adds this time to Go's time. Parts of the agent that poll share
// the ticks of one clock ([Clock.Poll]).
//
// Which clock measures what:
//
//   - A [Clock] measures the age of something that other machines may have changed during a suspend: TTLs and
//     staleness of replies, the age of the table, and the age of sockets to nameservers.
//   - time.Now and timers stand still during a suspend. They measure how long a server has not answered, and how long
//     to wait for it. A suspend is not the server's fault, and no client on this machine waits during a suspend.
//   - The wall clock tells when a certificate or a token expires. The snapshot file also has
//     a time of the wall clock, because this time is compared after a reboot.
package clock

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
)

// readEvery is how long the clock goes on using a time asleep that it has read. So on a busy machine, the first
// queries after a suspend may still see a time without that suspend.
const readEvery = 10 * time.Millisecond

// A Clock measures time, including suspends. It is safe for concurrent use.
type Clock struct {
	origin       time.Time
	asleep       func() time.Duration
	asleepBefore time.Duration // time asleep before origin

	// Times since origin, in nanoseconds.
	slept atomic.Int64 // time asleep since origin; never decreases
	read  atomic.Int64 // when slept was read, on CLOCK_MONOTONIC

	ticker ticker
}

// New returns a clock. Its time begins at time.Now.
func New() *Clock { return From(timeAsleep) }

// ForPolling returns a clock with the time tick between its ticks.
func ForPolling(tick time.Duration) *Clock {
	c := New()
	c.ticker.length = tick
	return c
}

// From returns a clock for tests. The clock calls the function asleep to find out how long the machine has been
// suspended since some time in the past.
func From(asleep func() time.Duration) *Clock {
	return &Clock{origin: time.Now(), asleep: asleep, asleepBefore: asleep(), ticker: ticker{length: Tick}}
}

// Now returns a time to compare with other times of this clock. The differences of these times include the time
// for which the machine was suspended, and ignore jumps of the wall clock.
func (c *Clock) Now() time.Time {
	now := time.Now()
	return now.Add(c.sleptAt(now))
}

// Since returns the time since t on this clock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Slept returns how long the machine has been suspended since the clock was made.
func (c *Clock) Slept() time.Duration { return c.sleptAt(time.Now()) }

func (c *Clock) sleptAt(now time.Time) time.Duration {
	elapsed, last := int64(now.Sub(c.origin)), c.read.Load()
	if elapsed-last < int64(readEvery) || !c.read.CompareAndSwap(last, elapsed) {
		return time.Duration(c.slept.Load())
	}
	slept := int64(c.asleep() - c.asleepBefore)
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

// Poll calls the function look at ticks of the clock, which begin with its first poll, until stop has returned. The
// time before each call is interval, rounded down to whole ticks, but at least one tick. When look returns true, the
// channel found gets a value; it has a buffer of one. look must be quick, because all polls of the clock run one after
// the other: a poll that waits for a disk delays all of them. look must not call stop.
func (c *Clock) Poll(interval time.Duration, look func() bool) (found <-chan struct{}, stop func()) {
	p := c.ticker.add(interval, look)
	return p.found, func() { c.ticker.remove(p) }
}

// Await calls the function look at the same ticks as [Clock.Poll]. It returns true when look has returned true, and
// false if ctx ends first.
func (c *Clock) Await(ctx context.Context, interval time.Duration, look func() bool) bool {
	found, stop := c.Poll(interval, look)
	defer stop()
	select {
	case <-found:
		return true
	case <-ctx.Done():
		return false
	}
}

// timeAsleep returns how long the machine has been suspended since it was booted. The result is too small by the
// time between the readings of the two clocks. It is 0 if the kernel lacks one of the clocks.
func timeAsleep() time.Duration {
	var boot, awake unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil {
		return 0
	}
	return time.Duration(boot.Nano() - awake.Nano())
}

// BackOff returns how long to wait after the nth failure in a row, counted from 0. The first wait is as long as
// the parameter first. The wait doubles with each further failure, but is never longer than the parameter
// longest.
func BackOff(n int, first, longest time.Duration) time.Duration {
	for ; n > 0 && first < longest; n-- {
		first *= 2
	}
	return min(first, longest)
}

// Jitter returns a random time from half of longest to longest. With it, programs that wait for the same reason do
// not all go on at the same time.
func Jitter(longest time.Duration) time.Duration { return longest/2 + rand.N(longest/2+1) }

// Retry calls the function attempt until it returns true, after pauses that double from 100 ms up to 5 s. It returns false
// if ctx ends first.
func Retry(ctx context.Context, attempt func() bool) bool {
	for n := 0; Sleep(ctx, BackOff(n, 100*time.Millisecond, 5*time.Second)); n++ {
		if attempt() {
			return true
		}
	}
	return false
}

// Sleep waits for the given time. It returns false if ctx ends first.
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

// Tick is the time between the ticks of a clock that [New] has made. It is short enough that a changed file is used
// within 1 s: at a tick the change is found, and a moment later a second reading must find the same contents.
const Tick = 800 * time.Millisecond

// A ticker calls the functions of all polls of a clock. It has one timer and one goroutine for all of them, because a
// wake-up of an idle process costs more than reading a file, and Go wakes another thread for each further goroutine.
type ticker struct {
	length time.Duration // from tick to tick

	mu    sync.Mutex
	polls map[*poll]struct{}
	timer *time.Timer // nil without polls
}

// A poll is a function that a ticker calls.
type poll struct {
	look           func() bool
	interval, left int           // ticks from call to call, and until the next call
	found          chan struct{} // gets a value when look has returned true
}

// add adds a poll that calls look as [Clock.Poll] describes, until remove is called for it.
func (t *ticker) add(interval time.Duration, look func() bool) *poll {
	ticks := max(int(interval/t.length), 1)
	p := &poll{look: look, interval: ticks, left: ticks, found: make(chan struct{}, 1)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.polls) == 0 {
		t.polls = make(map[*poll]struct{})
		t.timer = time.AfterFunc(t.length, t.call)
	}
	t.polls[p] = struct{}{}
	return p
}

// remove ends the calls of p. If a call has begun, remove waits until the call has ended.
func (t *ticker) remove(p *poll) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if delete(t.polls, p); len(t.polls) == 0 && t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
}

// call calls the functions of the polls that are due. A poll that has missed several ticks is called once.
func (t *ticker) call() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timer != nil {
		t.timer.Reset(t.length)
	}
	for p := range t.polls {
		if p.left--; p.left > 0 {
			continue
		}
		p.left = p.interval
		if p.look() {
			chans.Wake(p.found)
		}
	}
}
