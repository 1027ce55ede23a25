package upstream

import (
	"slices"
	"time"

	"github.com/miekg/dns"
)

// ended ends the query if there is nothing to ask or to wait for: a copy has brought the
// answer, the reply that is held is the answer, or no server is left. It reports whether the
// query is over.
func (s *schedule) ended(now time.Time) bool {
	s.useCopies(now)
	if !s.over {
		s.useHeld(now)
	}
	if !s.over {
		s.settle(now)
	}
	return s.over
}

// settle ends the query if no server is left that could answer: all have failed, or those
// that have not are down while another has sent a failure (rule 5).
func (s *schedule) settle(now time.Time) {
	left := s.any(func(*try) bool { return true })
	if left && s.bestFailure() >= 0 {
		left = s.any(func(t *try) bool { return t.standing.state < Down })
	}
	if !left {
		s.giveUp(nil, now)
	}
}

// bestFailure returns the index of the server with the best failure, -1 if there is none.
func (s *schedule) bestFailure() int {
	best := -1
	for i := range s.tries {
		t := &s.tries[i]
		if t.failure != nil && (best < 0 || betterFailure(t.code, s.tries[best].code)) {
			best = i
		}
	}
	return best
}

// win ends the query with an answer. Servers that failed where there is an answer, or were
// late with theirs, lose standing (rule 2).
func (s *schedule) win(i int, reply []byte, negative bool, now time.Time) {
	s.over, s.winner, s.reply, s.negative = true, i, reply, negative
	s.budget.earn()
	for j := range s.tries {
		t := &s.tries[j]
		switch {
		case j == i:
		case t.failure != nil && t.code == dns.RcodeRefused && s.options.inOrder():
			// A server for internal names refuses all others and leaves them to the
			// servers behind it.
		case t.failure != nil || t.malformed:
			s.act(actFailedAlone, j)
		case t.asked > 0 && !t.done && now.Sub(t.first) > t.standing.late:
			s.act(actLateAlone, j)
		}
	}
}

// giveUp ends the query with what there is: a truncated reply, one that is held, the best
// failure, or nothing because of cause.
func (s *schedule) giveUp(cause error, now time.Time) {
	s.over, s.cause = true, cause
	for i := range s.tries {
		if s.tries[i].truncated != nil {
			s.reply, s.winner = s.tries[i].truncated, i
			return
		}
	}
	if s.held >= 0 {
		s.win(s.held, s.heldReply, true, now)
		return
	}
	if best := s.bestFailure(); best >= 0 {
		s.reply, s.winner = s.tries[best].failure, best
	}
}

// This file is rule 12: a negative answer is held while a server that stands before its
// server in the order of configuration may have an answer.

// inOrder reports whether rule 12 applies.
func (o Options) inOrder() bool { return !o.byTime() && !o.Parallel }

// outranked reports whether a server that stands before the i-th may have an answer where
// the i-th has none.
func (s *schedule) outranked(i int, now time.Time) bool {
	if !s.options.inOrder() || s.once {
		return false
	}
	return slices.ContainsFunc(s.tries[:i], func(t try) bool { return t.mayKnow(now) })
}

// mayKnow reports whether a server lives and has yet to reply. One that is failing or does
// not answer has until it is late to do so. It is asked for this purpose only if it is
// failing because of its response codes, since that is soon known.
func (t *try) mayKnow(now time.Time) bool {
	st := &t.standing
	switch {
	case t.done:
		return false
	case st.serves(), t.truncated != nil: // a truncated reply is an answer
		return true
	case t.asked == 0:
		return st.state == Failing && !st.silent && !st.mute
	}
	return now.Sub(t.first) < st.late
}

// hold keeps a negative answer until the servers that outrank its server have answered,
// failed or fallen silent. Those that were not asked yet are asked.
func (s *schedule) hold(i int, reply []byte, now time.Time) {
	s.tries[i].done = true
	if s.held >= 0 && s.held < i {
		return
	}
	s.held, s.heldReply = i, reply
	s.late = earlier(s.late, now.Add(s.tries[i].standing.late))
	for j := range i {
		t := &s.tries[j]
		if !t.mayKnow(now) {
			continue
		}
		if !t.standing.serves() {
			s.late = earlier(s.late, now.Add(t.standing.late))
		}
		if t.asked == 0 {
			s.send(j, now)
		}
	}
	s.useCopies(now) // one may be of a server that outranks this one
}

// useHeld ends the query with the reply that is held, if no server outranks its server any
// more.
func (s *schedule) useHeld(now time.Time) {
	if s.held >= 0 && !s.outranked(s.held, now) {
		s.win(s.held, s.heldReply, true, now)
	}
}

// unsure reports whether the reply is a negative answer while a server that stands before
// its server has neither said the same nor REFUSED.
func (s *schedule) unsure() bool {
	return s.negative && s.options.inOrder() && slices.ContainsFunc(s.tries[:s.winner], func(t try) bool {
		return t.failure == nil || t.code != dns.RcodeRefused
	})
}
