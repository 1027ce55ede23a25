package upstream

import (
	"sync"
	"time"
)

// The timers of exchanges stand in one wheel. Nearly all of them are stopped before they are due, so setting and
// stopping a timer must cost little. A timer need not be exact: it may fire up to wheelTick late.
const (
	wheelTick  = 5 * time.Millisecond
	wheelSlots = 1024 // a turn is wheelSlots ticks; a timer due after more than a turn is looked at once in each turn
)

// A timer calls notify once it is due. The wheel's mutex guards the other fields of the timer.
type timer struct {
	notify     func(generation uint64) // never changes
	generation uint64                  // the generation of the exchange when the timer was set
	dueAt      time.Time
	prev, next *timer // in its slot; nil if it is not set
}

// A wheel holds the timers that are set. The zero wheel is empty. It has no goroutine: a timer of Go runs fire.
type wheel struct {
	mu        sync.Mutex
	origin    time.Time
	slots     [wheelSlots]timer // sentinels of rings of timers, one for each tick of a turn
	count     int               // how many timers are set
	passed    int64             // the last tick whose slot was looked at
	alarmTick int64             // the tick for which alarm is set; 0 if alarm is not set
	firing    bool              // the method fire runs; it sets alarm when it ends
	alarm     *time.Timer       // nil before the first timer
}

// tickOf returns the tick at which the wheel looks at a timer that is due at dueAt.
func (w *wheel) tickOf(dueAt time.Time) int64 { return int64(dueAt.Sub(w.origin)/wheelTick) + 1 }

// set sets a timer of an exchange, or changes the time of a timer that is set. The timer is due at dueAt. generation is
// the generation of the exchange.
func (w *wheel) set(t *timer, dueAt time.Time, generation uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t.next != nil {
		if t.dueAt.Equal(dueAt) {
			return
		}
		w.unlink(t)
	}
	if w.alarm == nil {
		w.origin = time.Now().Add(-wheelTick) // so that no tick is 0
		w.alarm = time.AfterFunc(time.Hour, w.fire)
	}
	t.dueAt, t.generation = dueAt, generation
	w.link(t)
	w.setAlarm(w.tickOf(dueAt))
}

// stop ends a timer. Its notify may be called even after that, if the timer was due already.
func (w *wheel) stop(t *timer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t.next != nil {
		w.unlink(t)
	}
}

func (w *wheel) link(t *timer) {
	tick := max(w.tickOf(t.dueAt), w.passed+1)
	end := &w.slots[tick%wheelSlots]
	if end.next == nil {
		end.prev, end.next = end, end
	}
	t.prev, t.next = end.prev, end
	t.prev.next, end.prev = t, t
	w.count++
}

func (w *wheel) unlink(t *timer) {
	t.prev.next, t.next.prev = t.next, t.prev
	t.prev, t.next = nil, nil
	w.count--
}

// setAlarm makes the method fire run at a tick, unless it will run earlier.
func (w *wheel) setAlarm(tick int64) {
	tick = max(tick, w.passed+1)
	if w.firing || w.alarmTick != 0 && w.alarmTick <= tick {
		return
	}
	w.alarmTick = tick
	w.alarm.Reset(time.Until(w.origin.Add(time.Duration(tick) * wheelTick)))
}

// fire notifies the exchanges whose timers are due. If many are due, it pauses now and then, because while a goroutine
// runs, Go looks only every 10 ms for packets that have arrived. Queries for mesh names must not wait for thousands of
// queries to silent nameservers.
func (w *wheel) fire() {
	const chunk, pause = 16, 20 * time.Microsecond
	for due := w.due(time.Now()); len(due) > 0; due = w.due(time.Now()) {
		for i, t := range due {
			if i%chunk == chunk-1 {
				time.Sleep(pause)
			}
			t.notify(t.generation)
		}
	}
}

// A dueTimer has what is needed to notify the exchange of a timer that was due.
type dueTimer struct {
	notify     func(generation uint64)
	generation uint64
}

// due removes the timers that are due. If no timer is due, it sets the alarm for the next one.
func (w *wheel) due(now time.Time) (due []dueTimer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	current := int64(now.Sub(w.origin) / wheelTick)
	for w.passed = max(w.passed, current-wheelSlots); w.passed < current; w.passed++ {
		end := &w.slots[(w.passed+1)%wheelSlots]
		for t := end.next; t != nil && t != end; {
			next := t.next
			if !now.Before(t.dueAt) {
				due = append(due, dueTimer{t.notify, t.generation})
				w.unlink(t)
			}
			t = next
		}
	}
	w.alarmTick, w.firing = 0, len(due) > 0
	for tick := w.passed + 1; w.count > 0 && !w.firing && tick <= w.passed+wheelSlots; tick++ {
		if end := &w.slots[tick%wheelSlots]; end.next != nil && end.next != end {
			w.setAlarm(tick)
			break
		}
	}
	return due
}
