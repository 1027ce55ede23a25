package clock

import (
	"sync"
	"time"
)

// Tick is the time between the ticks of a clock that [New] has made. It is short enough that a changed file is used
// within 1 s: at a tick the change is found, and a moment later a second reading must find the same contents.
const Tick = 800 * time.Millisecond

// A ticker calls the functions of all polls of a clock. It has one alarm and one goroutine for all of them, because a
// wake-up of an idle process costs more than reading a file, and Go wakes another thread for each further goroutine.
type ticker struct {
	origin time.Time     // the time of tick 0
	length time.Duration // from tick to tick
	kernel bool          // whether the alarm should be a timer of the kernel

	mu    sync.Mutex
	polls map[*poll]struct{}
	alarm alarm // nil without polls
}

// add adds a poll that calls look as [Clock.Poll] describes, until remove is called for it.
func (t *ticker) add(interval time.Duration, look func() bool) *poll {
	p := &poll{look: look, interval: max(int64(interval/t.length), 1), last: t.currentTick(), found: make(chan struct{}, 1)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.polls == nil {
		t.polls = make(map[*poll]struct{})
	}
	t.polls[p] = struct{}{}
	t.armLocked()
	return p
}

// remove ends the calls of p. If a call has begun, remove waits until the call has ended.
func (t *ticker) remove(p *poll) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.polls, p)
	if len(t.polls) == 0 && t.alarm != nil {
		t.alarm.stop()
		t.alarm = nil
	}
}

// currentTick returns the number of the current tick.
func (t *ticker) currentTick() int64 { return int64(time.Since(t.origin) / t.length) }

// call calls the functions of the polls that are due. A poll that has missed several ticks is called once.
//
// call sets the next alarm first. After the calls, an idle thread of Go's runtime might already sleep until a later
// timer. To set the alarm then would wake that thread.
func (t *ticker) call() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.currentTick()
	var due []*poll
	for p := range t.polls {
		if now >= p.next() {
			p.last = now
			due = append(due, p)
		}
	}
	if len(t.polls) > 0 {
		t.armLocked()
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

// armLocked sets the alarm to the next tick at which a poll is due.
func (t *ticker) armLocked() {
	var next int64
	for p := range t.polls {
		if n := p.next(); next == 0 || n < next {
			next = n
		}
	}
	if t.alarm == nil {
		t.alarm = newAlarm(t.kernel, t.call)
	}
	t.alarm.set(time.Duration(next)*t.length - time.Since(t.origin))
}

// A poll is a function that a ticker calls, with the ticks at which it is called.
type poll struct {
	look     func() bool
	interval int64         // in ticks
	last     int64         // the tick of the last call
	found    chan struct{} // gets a value when look has returned true
}

// next returns the number of the tick at which the next call is due.
func (p *poll) next() int64 { return (p.last/p.interval + 1) * p.interval }
