package upstream

import (
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
