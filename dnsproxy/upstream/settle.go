package upstream

import (
	"slices"
	"time"

	"github.com/miekg/dns"
)

// ended ends the query if there is nothing to ask or to wait for: the reply that is held is
// the answer, or no server is left. It reports whether the query is answered.
func (s *schedule) ended(now time.Time) bool {
	switch {
	case s.answered:
		s.over = s.over || !s.awaits()
	case s.held.reply != nil && !s.outranked(s.held.try):
		s.win(s.held, now)
	default:
		s.settle(now)
	}
	return s.answered
}

// settle ends the query if no server is left that may answer: all have failed; or one
// has failed, and the others are down and late (rule 5).
func (s *schedule) settle(now time.Time) {
	failed := s.bestFailure() >= 0
	left := func(t try) bool { return !t.done && (!failed || t.standing.state < Down || !t.late(now)) }
	if s.next() < 0 || !slices.ContainsFunc(s.tries, left) {
		s.giveUp(nil, now)
	}
}

// late reports whether the server was asked for the first time longer ago than rule 1 allows.
func (t *try) late(now time.Time) bool {
	return t.asked > 0 && !now.Before(t.first.Add(t.standing.late))
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

// win answers the query with a usable reply, or replaces the answer by it. The schedule goes
// on while an earlier server owes its reply (rule 6).
func (s *schedule) win(o outcome, now time.Time) {
	s.budget.earn()
	s.replaced, s.answered = s.answered, true
	s.winner, s.reply, s.plain = o.try, o.reply, o.plain
	s.provisional = s.inOrder() && slices.ContainsFunc(s.tries[:o.try], func(t try) bool { return !t.disclaims() })
	s.over = s.replaced || !s.awaits()
	s.late = now.Add(maxLate)
}

// giveUp ends the query with the best result so far: an answer, a truncated or held reply, the
// best failure, or no reply because of cause.
func (s *schedule) giveUp(cause error, now time.Time) {
	cut := slices.IndexFunc(s.tries, func(t try) bool { return t.truncated.reply != nil })
	switch {
	case s.answered:
	case cut >= 0:
		s.win(s.tries[cut].truncated, now)
	case s.held.reply != nil:
		s.win(s.held, now)
	default:
		s.answered, s.cause = true, cause
		if best := s.bestFailure(); best >= 0 {
			s.reply, s.winner = s.tries[best].failure, best
		}
	}
	s.over = true
}

// The rest of this file is rule 6: answers of servers that are not the first one.

// inOrder reports whether rule 6 applies.
func (s *schedule) inOrder() bool { return !s.options.Fastest && !s.once }

// outranked reports whether a server before the i-th may have an answer where the i-th has none.
func (s *schedule) outranked(i int) bool {
	return s.inOrder() && slices.ContainsFunc(s.tries[:i], func(t try) bool { return t.mayKnow() })
}

// awaits reports whether a server before the winner owes its reply.
func (s *schedule) awaits() bool {
	return s.inOrder() && slices.ContainsFunc(s.tries[:s.winner], func(t try) bool { return t.asked > 0 && !t.done && t.mayKnow() })
}

// mayKnow reports whether a server lives and has yet to reply, or has sent a truncated reply,
// which is an answer.
func (t *try) mayKnow() bool { return t.truncated.reply != nil || !t.done && t.standing.lives() }

// disclaims reports whether a server has said that the question is not for it, as a server for
// internal names does: it has answered for itself.
func (t *try) disclaims() bool {
	return t.failure != nil && (t.code == dns.RcodeRefused || t.code == dns.RcodeNotImplemented)
}

// hold keeps a negative answer until the servers before its server have answered, failed or
// fallen silent. Servers that were not asked yet are asked.
func (s *schedule) hold(o outcome, now time.Time) {
	s.tries[o.try].done = true
	if s.held.reply != nil && s.held.try < o.try {
		return
	}
	s.held = o
	s.late = earlier(s.late, now.Add(s.tries[o.try].standing.late))
	for i := range o.try {
		if t := &s.tries[i]; t.asked == 0 && t.mayKnow() {
			s.send(i, now)
		}
	}
}
