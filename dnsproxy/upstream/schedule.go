package upstream

import (
	"errors"
	"fmt"
	"time"
)

// A schedule decides for one query which server is asked when, which reply is the answer,
// and when to give up (rules 3 to 8 and 10 to 13 of the package comment). It is a plain value like
// history: it has no clock, no sockets and no goroutines, so that tests can drive it event
// by event.
//
// The exchange calls see with the standing of each server, then start, and then receive
// for each outcome, wake at wakeAt, and giveUp if the caller cancels the query. After each
// of these it carries out actions, until the schedule is over.
type schedule struct {
	// Set before start.
	options  Options
	tries    []try // a server each, in the order of configuration
	deadline time.Time
	budget   *budget // of rule 10, shared by all queries of the group
	random   uint64  // drawn for this query; picks among equal servers
	once     bool    // the query must not be sent twice (rule 11)
	edns     bool    // the query has an OPT record that may be left out
	overTCP  bool    // a truncated reply is asked for over TCP (rule 13)

	actions []action // to be carried out by the exchange, in order

	late           time.Time     // when the server asked last is late and the next is asked
	maxWait        time.Duration // bound of the time until late
	truncatedUntil time.Time     // when a truncated reply is good enough; zero if there is none
	repeated       bool          // the query was sent again because a server was late

	held      int // index of the server whose reply is held, -1 if none is (rule 12)
	heldReply []byte

	// The end.
	over     bool
	winner   int    // index of the server whose reply it is
	reply    []byte // nil if there is none
	negative bool   // reply is a negative answer
	cause    error  // why servers without a reply are no longer waited for; may be nil
}

// A try is what the schedule of a query knows of one server.
type try struct {
	standing standing  // as last passed to see
	asked    int       // how often the query was sent to it
	first    time.Time // when the query was first sent to it
	done     bool      // it is not asked again: it has failed, or its reply is held
	stream   bool      // ask over a connection
	plain    bool      // ask without EDNS

	err       error  // why it has failed without a reply that can be used
	malformed bool   // its reply was malformed
	failure   []byte // its reply, if that was a failure
	code      int    // response code of failure
	truncated []byte // its truncated reply, while the whole one is waited for

	copied   bool      // it was sent a copy, whose outcomes do not count yet (rule 6)
	outcomes []outcome // of the copy, so far
}

// An outcome is the end of an attempt.
type outcome struct {
	try           int
	reply         []byte
	reading       reading // of reply
	err           error   // why there is no reply
	stream, plain bool    // how the server was asked
}

// An action is what the exchange does to a server on behalf of the schedule.
type action struct {
	kind actionKind
	try  int
}

type actionKind uint8

const (
	actSend          actionKind = iota // send it the query
	actHedge                           // count a query sent because a server was late
	actFolds                           // note that it does not keep the case of letters
	actAnsweredPlain                   // note that it answered a query without EDNS
	actMalformed                       // note a malformed reply: try.err
	actFailure                         // note a failure: try.code
	actFailedAlone                     // note that it failed where another server had an answer
	actLateAlone                       // note that it was late for a query that another answered
)

// reset makes s the schedule of no query; its memory is used again.
func (s *schedule) reset() {
	clear(s.tries)
	*s = schedule{tries: s.tries[:0], actions: s.actions[:0], held: -1}
}

func (s *schedule) act(kind actionKind, i int) {
	s.actions = append(s.actions, action{kind, i})
}

// see takes the standing of a server. It is to be called for every server before start,
// wake, and an outcome that is not an answer. A server that loops, or is down and full, has failed.
func (s *schedule) see(i int, st standing) {
	t := &s.tries[i]
	t.standing = st
	switch {
	case st.state == Looping:
		t.done, t.err = true, ErrLoop
	case st.full && st.state == Down && t.asked == 0:
		t.done, t.err = true, ErrSilent
	}
}

// start asks the best server (rule 4), and those that get a copy (rule 6): copyDue reports
// whether a server is due for one. All are asked if all are down (rule 7) or with
// Options.Parallel (rule 8).
func (s *schedule) start(now time.Time, copyDue func(try int) bool) {
	s.maxWait = maxLate
	all := s.options.Parallel
	if !s.any(func(t *try) bool { return t.standing.state < Down }) {
		s.maxWait, all = maxDownWait, true
	}
	first := s.next()
	for i := range s.tries {
		t := &s.tries[i]
		switch {
		case i == first || t.done || s.once:
		case copyDue(i):
			t.copied = !all
			s.send(i, now)
		case all:
			s.send(i, now)
		}
	}
	if first < 0 {
		s.settle(now)
		return
	}
	s.ask(first, now)
}

// any reports whether match is true for a server that may be asked again.
func (s *schedule) any(match func(*try) bool) bool {
	for i := range s.tries {
		if !s.tries[i].done && match(&s.tries[i]) {
			return true
		}
	}
	return false
}

// ask sends the query to a server and waits for it until it is late; each time that the
// server is asked, twice as long (rule 4).
func (s *schedule) ask(i int, now time.Time) {
	t := &s.tries[i]
	s.late = now.Add(min(t.standing.late<<min(t.asked, 8), s.maxWait))
	s.send(i, now)
}

// send sends the query to a server, unless that is full: then the query waits for a sign of life.
func (s *schedule) send(i int, now time.Time) {
	t := &s.tries[i]
	if t.standing.full {
		return
	}
	if t.asked == 0 {
		t.first = now
	}
	t.asked++
	s.act(actSend, i)
}

// expired reports whether the time of the query is up.
func (s *schedule) expired(now time.Time) bool { return !now.Before(s.deadline) }

// wakeAt returns when wake is to be called, if the query is not over by then.
func (s *schedule) wakeAt() time.Time {
	at := earlier(s.late, s.deadline)
	if !s.truncatedUntil.IsZero() {
		at = earlier(at, s.truncatedUntil)
	}
	return at
}

// wake is called at wakeAt. It asks the next server if the one asked last is late.
func (s *schedule) wake(now time.Time) {
	switch {
	case s.expired(now):
		s.giveUp(ErrTimeout, now)
	case s.ended(now):
	case !s.truncatedUntil.IsZero() && !now.Before(s.truncatedUntil):
		s.giveUp(ErrTimeout, now) // with the truncated reply
	case now.Before(s.late):
	default:
		s.repeat(now)
	}
}

// repeat sends the query to the next server because one is late, if the query may be sent
// twice (rule 11) and the budget allows it (rule 10).
func (s *schedule) repeat(now time.Time) {
	i := s.next()
	if s.once || !s.mayRepeat(&s.tries[i].standing, now) {
		s.late = now.Add(s.maxWait)
		return
	}
	s.repeated = true
	s.act(actHedge, i)
	s.ask(i, now)
}

// receive takes the outcome of an attempt.
func (s *schedule) receive(o outcome, now time.Time) {
	t := &s.tries[o.try]
	switch {
	case s.over:
	case t.copied:
		t.outcomes = append(t.outcomes, o)
	case o.err != nil:
		s.receiveError(o, now)
	case !o.reading.usable():
		s.receiveFailure(o, now)
	case o.reading.truncated && !o.stream && s.overTCP:
		s.receiveTruncated(o, now)
	default:
		s.receiveAnswer(o, now)
	}
}

func (s *schedule) receiveError(o outcome, now time.Time) {
	t := &s.tries[o.try]
	switch {
	case errors.Is(o.err, errCase):
		s.act(actFolds, o.try)
		s.again(o.try, now, &t.stream)
	case t.truncated != nil && o.stream:
		s.win(o.try, t.truncated, false, now)
	default:
		t.err = cause(o.err)
		s.fail(o.try, now)
	}
}

func (s *schedule) receiveFailure(o outcome, now time.Time) {
	t := &s.tries[o.try]
	switch {
	case o.reading.err != nil:
		t.malformed, t.err = true, fmt.Errorf("%w: %w", ErrMalformed, o.reading.err)
		s.act(actMalformed, o.try)
		s.fail(o.try, now)
	case o.reading.rejectsEDNS() && !o.plain && s.edns:
		s.again(o.try, now, &t.plain)
	default:
		t.failure, t.code = o.reply, o.reading.code
		s.act(actFailure, o.try)
		s.fail(o.try, now)
	}
}

// receiveTruncated is rule 13: the whole of a truncated reply is asked for over TCP, and waited
// for until truncatedUntil.
func (s *schedule) receiveTruncated(o outcome, now time.Time) {
	t := &s.tries[o.try]
	t.truncated = o.reply
	if s.truncatedUntil.IsZero() {
		s.truncatedUntil = now.Add(truncatedWait)
	}
	s.again(o.try, now, &t.stream)
}

func (s *schedule) receiveAnswer(o outcome, now time.Time) {
	if o.plain {
		s.act(actAnsweredPlain, o.try)
	}
	if o.reading.negative && s.outranked(o.try, now) {
		s.hold(o.try, o.reply, now)
		return
	}
	s.win(o.try, o.reply, o.reading.negative, now)
}

// useCopies takes the outcomes of copies, once the server that was asked is late or has
// failed (rule 6).
func (s *schedule) useCopies(now time.Time) {
	for i := range s.tries {
		t := &s.tries[i]
		outcomes := t.outcomes
		t.copied, t.outcomes = false, nil
		for _, o := range outcomes {
			s.receive(o, now)
		}
	}
}

// again asks a server once more in another way, which is also how it is asked from now on.
func (s *schedule) again(i int, now time.Time, way *bool) {
	if *way {
		return // another attempt had the same outcome before
	}
	*way = true
	s.late = now.Add(s.tries[i].standing.late)
	s.send(i, now)
}

// fail is rule 5: a failure moves on to the next server at once.
func (s *schedule) fail(i int, now time.Time) {
	s.tries[i].done = true
	if s.ended(now) {
		return
	}
	if next := s.next(); s.tries[next].asked == 0 {
		s.ask(next, now)
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// next returns the index of the server to ask next: the best (rule 3) of those that were
// asked least, or -1 if none may be asked again. While a reply is held (rule 12) only
// servers that outrank its server are asked.
func (s *schedule) next() int {
	best, least := -1, 0
	for i := range s.tries {
		t := &s.tries[i]
		if t.done || s.held >= 0 && i > s.held {
			continue
		}
		if best < 0 || t.asked < least || t.asked == least && t.standing.better(s.tries[best].standing, s.options.byTime()) {
			best, least = i, t.asked
		}
	}
	if best < 0 || !s.options.byTime() || !s.tries[best].standing.serves() {
		return best
	}
	return s.amongEqual(best, least)
}

// amongEqual returns the server to ask of those about as fast as the best: the first in
// the order of configuration, or with Options.Rotate one at random (rule 3).
func (s *schedule) amongEqual(best, asked int) int {
	limit, equal := s.tries[best].standing.rtt*3/2+5*time.Millisecond, uint64(0)
	for i := range s.tries {
		t := &s.tries[i]
		if t.done || t.asked != asked || !t.standing.serves() || t.standing.rtt > limit {
			continue
		}
		if !s.options.Rotate {
			return i
		}
		equal++
		if s.random%equal == 0 {
			best = i
		}
		s.random /= equal
	}
	return best
}

// byTime reports whether servers are ranked by time, and in the order of configuration
// only among those about equally fast (rule 3).
func (o Options) byTime() bool { return o.Fastest || o.Rotate }

// serves reports whether the server is up and, as far as is known, answers.
func (s standing) serves() bool { return s.state == Up && !s.silent }

// better reports whether s ranks before other by rule 3, except for the order of
// configuration.
func (s standing) better(other standing, byTime bool) bool {
	switch {
	case s.state != other.state:
		return s.state < other.state
	case byTime || s.silent && other.silent:
		return s.rtt < other.rtt
	}
	return !s.silent && other.silent
}
