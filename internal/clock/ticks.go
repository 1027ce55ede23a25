package clock

import (
	"sync"
	"time"
)

// Tick is the time between the ticks of a clock, unless [ForPolling] was called with a shorter one. Files that are
// read at each tick, and must read the same a moment later, are followed within 1 s.
const Tick = 800 * time.Millisecond

// ticks are what polls at the ticks of a clock. One alarm and one goroutine serve all of it: a wake-up of an
// idle process costs more than reading a file, and Go wakes another thread for each further goroutine.
type ticks struct {
	origin time.Time // of the first tick
	length time.Duration
	kernel bool // the alarm is a timer of the kernel, if there can be one

	mu    sync.Mutex
	polls map[*poll]struct{}
	alarm alarm // nil without polls
}

// add adds a function that is called as [Clock.Poll] describes, until it is removed.
func (t *ticks) add(every time.Duration, look func() bool) *poll {
	p := &poll{look: look, every: max(int64(every/t.length), 1), last: t.tick(), found: make(chan struct{}, 1)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.polls == nil {
		t.polls = make(map[*poll]struct{})
	}
	t.polls[p] = struct{}{}
	t.armLocked()
	return p
}

// remove ends the calls.
func (t *ticks) remove(p *poll) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.polls, p)
	if len(t.polls) == 0 && t.alarm != nil {
		t.alarm.stop()
		t.alarm = nil
	}
}

// tick returns the number of the current tick.
func (t *ticks) tick() int64 { return int64(time.Since(t.origin) / t.length) }

// call makes the calls that are due. After a delay there is one for all ticks that have passed. The alarm is
// set first: a thread that already waits for a later one would have to be woken for it.
func (t *ticks) call() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.tick()
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

// armLocked sets the alarm to the next call.
func (t *ticks) armLocked() {
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

// A poll is a function that is called at ticks.
type poll struct {
	look  func() bool
	every int64 // in ticks
	last  int64 // the tick of the last call
	found chan struct{}
}

// next returns the number of the tick of the next call.
func (p *poll) next() int64 { return (p.last/p.every + 1) * p.every }
