package upstream

import "time"

// ended reports whether no other server is to be asked: a copy has brought the answer, or no
// server is left that could.
func (e *exchange) ended(now time.Time) bool {
	e.useCopies(now)
	if !e.over {
		e.useHeld(now)
	}
	if !e.over {
		e.settle(now)
	}
	return e.over
}

// settle ends the exchange if no server is left that could answer.
func (e *exchange) settle(now time.Time) {
	if !e.any(func(*try) bool { return true }) {
		e.giveUp(nil)
		return
	}
	if e.bestFailure() < 0 {
		return
	}
	e.look(now)
	if !e.any(func(t *try) bool { return t.standing.state < Down }) {
		e.giveUp(nil)
	}
}

// bestFailure returns the server with the best failure, -1 if there is none.
func (e *exchange) bestFailure() int {
	best := -1
	for i := range e.tries {
		t := &e.tries[i]
		if t.failure != nil && (best < 0 || betterFailure(t.code, e.tries[best].code)) {
			best = i
		}
	}
	return best
}

// win ends the exchange with a usable reply. It is noted of servers that failed where
// there was an answer, or were late with theirs (rule 2).
func (e *exchange) win(i int, reply []byte) {
	e.over, e.reply, e.winner = true, reply, i
	e.group.budget.earn()
	now := time.Now()
	for j := range e.tries {
		t := &e.tries[j]
		switch {
		case j == i:
		case t.failure != nil && t.code == rcodeRefused && e.options.inOrder():
			// It answers, and leaves other names to the servers behind it, as one for
			// internal names does.
		case t.failure != nil || t.garbled:
			t.server.outdone()
		case t.asked > 0 && !t.failed && now.Sub(t.first) > t.standing.late:
			t.server.outlive()
		}
	}
}

// giveUp ends the exchange with what there is: a truncated reply, one that is held, a
// failure, or an error.
func (e *exchange) giveUp(cause error) {
	e.over = true
	for i := range e.tries {
		if e.tries[i].cut != nil {
			e.reply, e.winner = e.tries[i].cut, i
			return
		}
	}
	if e.held >= 0 {
		e.win(e.held, e.heldReply)
		return
	}
	if best := e.bestFailure(); best >= 0 {
		e.reply, e.winner = e.tries[best].failure, best
		return
	}
	e.err = newNoReply(e.tries, cause)
}
