package upstream

import (
	"math/rand/v2"
	"slices"
	"time"
)

// next returns the best of the servers that were asked least, -1 if none is left
// (rules 3 and 12).
func (e *exchange) next() int {
	best, least := -1, 0
	for i := range e.tries {
		t := &e.tries[i]
		if t.failed || e.held >= 0 && i > e.held {
			continue
		}
		if best < 0 || t.asked < least || t.asked == least && t.standing.better(e.tries[best].standing, e.options.byTime()) {
			best, least = i, t.asked
		}
	}
	if best < 0 || !e.tries[best].standing.serves() || !e.options.byTime() {
		return best
	}
	limit, seen := e.tries[best].standing.rtt*3/2+5*time.Millisecond, 0
	for i := range e.tries {
		t := &e.tries[i]
		if t.failed || t.asked != least || !t.standing.serves() || t.standing.rtt > limit {
			continue
		}
		if !e.options.Rotate {
			return i
		}
		if seen++; rand.IntN(seen) == 0 {
			best = i
		}
	}
	return best
}

// byTime reports whether the order of configuration is of no account unless servers are
// about equally fast.
func (o Options) byTime() bool { return o.Fastest || o.Rotate }

// serves reports whether the server is up and, as far as is known, answers.
func (s standing) serves() bool { return s.state == Up && !s.silent }

// better is rule 3, without the order of configuration.
func (s standing) better(other standing, byTime bool) bool {
	switch {
	case s.state != other.state:
		return s.state < other.state
	case byTime || s.silent && other.silent:
		return s.rtt < other.rtt
	}
	return !s.silent && other.silent
}

// inOrder reports whether the order of configuration says who may say that there is
// nothing (rule 12).
func (o Options) inOrder() bool { return !o.byTime() && !o.Parallel }

// outranked reports whether a server that stands before the i-th in the configuration
// may have what the i-th has not (rule 12).
func (e *exchange) outranked(i int, now time.Time) bool {
	if !e.options.inOrder() || e.once() {
		return false
	}
	return slices.ContainsFunc(e.tries[:i], func(t try) bool { return t.mayKnow(now) })
}

// mayKnow reports whether a server lives and has yet to say what it has. One that is
// failing or does not answer has no longer for that than until it is late, and is not asked
// for this purpose unless it fails by response codes, which is soon known.
func (t *try) mayKnow(now time.Time) bool {
	st := &t.standing
	switch {
	case t.failed:
		return false
	case st.serves(), t.cut != nil: // a truncated reply says that there is something
		return true
	case t.asked == 0:
		return st.state == Failing && !st.silent && !st.mute
	}
	return now.Sub(t.first) < st.late
}

// hold keeps a reply that says that there is nothing, until the servers that outrank its
// server have answered, failed or fallen silent. Those that were not asked yet are asked.
func (e *exchange) hold(i int, reply []byte, now time.Time) {
	e.tries[i].failed = true // it has said what it has to say
	if e.held >= 0 && e.held < i {
		return
	}
	e.held, e.heldReply = i, reply
	e.late = minTime(e.late, now.Add(e.tries[i].standing.late))
	for j := range i {
		t := &e.tries[j]
		if !t.mayKnow(now) {
			continue
		}
		if !t.standing.serves() {
			e.late = minTime(e.late, now.Add(t.standing.late))
		}
		if t.asked == 0 {
			e.ask(j, now)
		}
	}
	e.useCopies(now) // those of servers that may know more count
	if !e.over {
		e.setTimer(now)
	}
}

// useHeld ends the exchange with the reply that is held, if no server outranks it any
// more.
func (e *exchange) useHeld(now time.Time) {
	if e.held >= 0 && !e.outranked(e.held, now) {
		e.win(e.held, e.heldReply)
	}
}

// unsure reports whether the reply says that there is nothing while a server that stands
// before its server has neither said so nor refused to be asked.
func (e *exchange) unsure() bool {
	return e.negative && e.options.inOrder() && slices.ContainsFunc(e.tries[:e.winner], func(t try) bool {
		return t.failure == nil || t.code != rcodeRefused
	})
}

func minTime(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
