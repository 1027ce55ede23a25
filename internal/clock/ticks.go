package clock

import (
	"context"
	"sync"
	"time"
)

// Tick is the time between the ticks of a clock, unless [ForPolling] was called with a shorter one. Files that are
// read at each tick, and must read the same a moment later, are followed within 1 s.
const Tick = 800 * time.Millisecond

// ticks are what polls at the ticks of a clock. One alarm and one goroutine serve all of it: a wake-up of an
// idle process costs more than reading a file, and Go wakes another thread for each further goroutine.
type ticks struct {
	length time.Duration
	kernel bool // the alarm is a timer of the kernel, if there can be one

	mu    sync.Mutex
	polls map[*poll]struct{}
	alarm alarm // nil without polls
}

// A poll is a function that is called at ticks.
type poll struct {
	look  func() bool
	every int64 // in ticks
	last  int64 // the tick of the last call
	found chan struct{}
}

// Poll calls look at ticks of the clock, as often as every says or, if that is no multiple of a tick, a bit
// more often. It sends to found, which has a buffer, when look returns true, until stop is called. look must be quick,
// because all polls of the clock take turns: one that waits for a disk keeps the others waiting.
// It is not called after stop has returned, and must not call stop.
func (c *Clock) Poll(every time.Duration, look func() bool) (found <-chan struct{}, stop func()) {
	p := &poll{look: look, every: max(int64(every/c.ticks.length), 1), last: c.tick(), found: make(chan struct{}, 1)}
	t := &c.ticks
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.polls == nil {
		t.polls = make(map[*poll]struct{})
	}
	t.polls[p] = struct{}{}
	c.armLocked()
	return p.found, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.polls, p)
		if len(t.polls) == 0 && t.alarm != nil {
			t.alarm.stop()
			t.alarm = nil
		}
	}
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

// tick returns the number of the current tick.
func (c *Clock) tick() int64 { return int64(time.Since(c.origin) / c.ticks.length) }

// call makes the calls that are due. After a delay there is one for all ticks that have passed. The alarm is
// set first: a thread that already waits for a later one would have to be woken for it.
func (c *Clock) call() {
	t := &c.ticks
	t.mu.Lock()
	defer t.mu.Unlock()
	now := c.tick()
	var due []*poll
	for p := range t.polls {
		if now >= p.next() {
			p.last = now
			due = append(due, p)
		}
	}
	if len(t.polls) > 0 {
		c.armLocked()
	}
	for _, p := range due {
		if p.look() {
			select {
			case p.found <- struct{}{}:
			default:
			}
		}
	}
}

// next returns the number of the tick of the next call.
func (p *poll) next() int64 { return (p.last/p.every + 1) * p.every }

// armLocked sets the alarm to the next call.
func (c *Clock) armLocked() {
	t := &c.ticks
	var next int64
	for p := range t.polls {
		if n := p.next(); next == 0 || n < next {
			next = n
		}
	}
	if t.alarm == nil {
		t.alarm = c.newAlarm()
	}
	t.alarm.set(time.Duration(next)*c.ticks.length - time.Since(c.origin))
}
