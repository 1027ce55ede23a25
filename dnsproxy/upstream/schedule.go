package upstream

import (
	"fmt"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A schedule decides for one query which server is asked when, which reply is the answer, and when to give up (rules 3
// to 8 of the package comment). It is a plain value: it has no clock, no sockets and no
// goroutines, so that tests can drive it event by event.
//
// An exchange uses its schedule like this. It calls setStanding for each server, and then the method start. After that,
// it calls the method receive for each outcome, and the method wake at the time that wakeAt returns. After each call it
// carries out the actions in the field actions. This goes on until the schedule is over, or the caller cancels the
// query.
type schedule struct {
	// These fields are set before the method start is called.
	options  Options
	tries    []try // one for each server, in the order of configuration
	deadline time.Time
	sendOnce bool    // the query must not be sent twice (rule 8)
	edns     bool    // the query has an OPT record that may be left out
	retryTCP bool    // after a truncated reply, the query is sent over TCP (rule 8)

	actions []action // to be carried out by the exchange, in order

	lateAt         time.Time     // when the server asked last will be late and the next one is asked
	truncatedUntil time.Time     // when a truncated reply becomes the answer; zero if there is none

	held outcome // a negative answer that is held (rule 6); its reply is nil if none is held

	// These fields describe the result.
	over        bool   // the fields winner, reply, provisional, noOPT and cause are set
	winner      int    // index of the server that sent the reply
	reply       []byte // the answer; nil if there is none
	provisional bool   // an earlier server may have another answer (rule 6)
	noOPT       bool   // the query was sent without its OPT record
	cause       error  // why the query no longer waits for servers without a reply; may be nil
}

// A try is what the schedule of a query knows about one server.
type try struct {
	standing standing  // as last passed to setStanding
	sends    int       // how often the query was sent to it
	first    time.Time // when the query was first sent to it
	done     bool      // it is not asked again: it has failed, or its reply is held
	stream   bool      // it is asked over a connection
	inTurn   bool      // if it is asked again, stream changes
	noOPT    bool      // it is asked without EDNS

	err       error   // why it has failed without a reply that can be used
	failure   []byte  // its reply, if that was a failure
	code      int     // response code of failure
	truncated outcome // its truncated reply, while the query waits for the whole one
}

// An outcome is the end of an attempt.
type outcome struct {
	try, sends    int // copied from the attempt
	reply         []byte
	reading       reading // of reply
	err           error   // why there is no reply
	stream, noOPT bool    // how the server was asked
}

// An action is something that the exchange has to do for the schedule. It concerns the server with the index try.
type action struct {
	kind actionKind
	try  int
}

type actionKind uint8

const (
	actSend      actionKind = iota // send the server the query
	actHedge                       // count a query that is sent to the server because another was late
	actMalformed                   // note a malformed reply; the error is in try.err
	actFailure                     // note a failure; the response code is in try.code
)

// reset empties s and keeps its memory for the next query.
func (s *schedule) reset() {
	clear(s.tries)
	*s = schedule{tries: s.tries[:0], actions: s.actions[:0]}
}

func (s *schedule) act(kind actionKind, i int) {
	s.actions = append(s.actions, action{kind, i})
}

// setStanding sets the standing of a server. The exchange calls it for every server before it calls the method start or
// wake, and before it passes an outcome that is not an answer to the method receive. A server that loops has failed,
// and so has a server that is down and full (rule 7), if it was not asked yet.
func (s *schedule) setStanding(i int, st standing) {
	t := &s.tries[i]
	t.standing = st
	switch {
	case st.state == Looping:
		t.done, t.err = true, ErrLoop
	case st.full && st.state == Down && t.sends == 0:
		t.done, t.err = true, ErrSilent
	}
}

// start asks the best server (rule 4). If the best server is down, all servers are down (rule 3), and
// all are asked (rule 7).
func (s *schedule) start(now time.Time) {
	first := s.next()
	if first < 0 {
		s.settle(now)
		return
	}
	s.askFirst(first, now)
}

// askFirst asks the best server that is left, for the first time. If this server is down, all servers that are left
// are down, and they are asked, too (rule 7).
func (s *schedule) askFirst(best int, now time.Time) {
	s.ask(best, now)
	for i := range s.tries {
		if t := &s.tries[i]; s.tries[best].standing.state == Down && !s.sendOnce && i != best && !t.done && t.sends == 0 {
			s.send(i, now)
		}
	}
}

// ask sends the query to a server and waits until the server is late. Each time that the same
// server is asked again, the wait is twice as long (rule 4).
func (s *schedule) ask(i int, now time.Time) {
	t := &s.tries[i]
	t.stream = t.stream != (t.inTurn && t.sends > 0)
	limit := maxWait
	if s.held.reply != nil {
		limit = maxLate // then wake sees whether the earlier servers still live
	}
	s.lateAt = now.Add(min(t.standing.lateAfter<<min(t.sends, 8), limit))
	s.send(i, now)
}

// send sends the query to a server. If the server is full (rule 7), it sends nothing: the query waits for a reply to a
// probe.
func (s *schedule) send(i int, now time.Time) {
	t := &s.tries[i]
	if t.standing.full {
		return
	}
	if t.sends == 0 {
		t.first = now
	}
	t.sends++
	s.act(actSend, i)
}

// expired reports whether the time of the query is up.
func (s *schedule) expired(now time.Time) bool { return !now.Before(s.deadline) }

// wakeAt returns when wake is to be called, if the schedule is not over by then.
func (s *schedule) wakeAt() time.Time {
	at := earlier(s.lateAt, s.deadline)
	if !s.truncatedUntil.IsZero() {
		at = earlier(at, s.truncatedUntil)
	}
	return at
}

// wake is called at the time that wakeAt returns. It asks the next server if the server asked last is late.
func (s *schedule) wake(now time.Time) {
	switch {
	case s.expired(now), !s.truncatedUntil.IsZero() && !now.Before(s.truncatedUntil):
		s.giveUp(ErrTimeout)
	case s.endIfDone(now), now.Before(s.lateAt):
	default:
		s.repeat(now)
	}
}

// repeat is called when a server is late. It sends the query to the next server, unless the query must not be sent
// twice (rule 8).
func (s *schedule) repeat(now time.Time) {
	if s.sendOnce {
		s.lateAt = now.Add(maxWait)
		return
	}
	i := s.next()
	s.act(actHedge, i)
	s.ask(i, now)
}

// receive takes the outcome of an attempt.
func (s *schedule) receive(o outcome, now time.Time) {
	switch {
	case s.over:
	case o.err != nil:
		s.receiveError(o, now)
	case !o.reading.usable():
		s.receiveFailure(o, now)
	case o.reading.truncated && !o.stream && s.retryTCP:
		s.receiveTruncated(o, now)
	default:
		s.receiveAnswer(o, now)
	}
}

func (s *schedule) receiveError(o outcome, now time.Time) {
	t := &s.tries[o.try]
	t.err = cause(o.err)
	switch {
	case !o.stream || !t.inTurn || t.truncated.reply != nil:
		s.fail(o.try, now)
	case t.stream: // otherwise it was asked over UDP already
		s.ask(o.try, now)
	}
}

func (s *schedule) receiveFailure(o outcome, now time.Time) {
	t := &s.tries[o.try]
	switch {
	case o.reading.err != nil:
		t.err = fmt.Errorf("%w: %w", ErrMalformed, o.reading.err)
		s.act(actMalformed, o.try)
		s.fail(o.try, now)
	case o.reading.rejectsEDNS() && !o.noOPT && s.edns:
		s.askAgain(o.try, now, &t.noOPT)
	default:
		t.failure, t.code = o.reply, o.reading.code
		s.act(actFailure, o.try)
		s.fail(o.try, now)
	}
}

// receiveTruncated asks for the whole of a truncated reply over TCP, and waits for it until
// truncatedUntil (rule 8).
func (s *schedule) receiveTruncated(o outcome, now time.Time) {
	t := &s.tries[o.try]
	t.truncated = o
	if s.truncatedUntil.IsZero() {
		s.truncatedUntil = now.Add(truncatedWait)
	}
	s.askAgain(o.try, now, &t.stream)
}

func (s *schedule) receiveAnswer(o outcome, now time.Time) {
	if o.reading.negative && s.outranked(o.try) {
		s.hold(o, now)
		return
	}
	s.win(o)
}

// askAgain asks a server once more, in another way: over a connection, or without EDNS. way points to the field stream
// or noOPT of the server's try. askAgain sets this field, so that the server is asked in this way from now on.
func (s *schedule) askAgain(i int, now time.Time, way *bool) {
	if *way {
		return // another attempt had the same outcome before
	}
	*way = true
	s.lateAt = now.Add(s.tries[i].standing.lateAfter)
	s.send(i, now)
}

// fail moves on from a server that has failed for this question (rule 5).
func (s *schedule) fail(i int, now time.Time) {
	s.tries[i].done = true
	if s.endIfDone(now) {
		return
	}
	if next := s.next(); s.tries[next].sends == 0 {
		s.askFirst(next, now)
	}
}

// next returns the index of the server to ask next: the best (rule 3) of the servers
// that were asked the fewest times. It returns -1 if none may be asked. While a reply is held (rule
// 6), only servers before the server that sent it are asked.
func (s *schedule) next() int {
	tries := s.tries
	if s.held.reply != nil {
		tries = tries[:s.held.try]
	}
	best := -1
	for i := range tries {
		if t := &tries[i]; !t.done && (best < 0 || t.precedes(&tries[best], s.options.Fastest)) {
			best = i
		}
	}
	if best < 0 || !s.options.Fastest {
		return best
	}
	// Servers about as fast as the fastest are asked in the order of configuration.
	fastest := tries[best]
	fastest.standing.rtt = fastest.standing.rtt*3/2 + 5*time.Millisecond
	for i := range tries[:best] {
		if t := &tries[i]; !t.done && t.precedes(&fastest, true) {
			return i
		}
	}
	return best
}

// endIfDone ends the query if it need not wait any more, because the reply that is held becomes the answer, or no
// server is left. It reports whether the query is over.
func (s *schedule) endIfDone(now time.Time) bool {
	if s.held.reply != nil && !s.outranked(s.held.try) {
		s.win(s.held)
	} else {
		s.settle(now)
	}
	return s.over
}

// settle ends the query if no server is left that may answer. Either all servers have failed, or some
// have sent a failure, and the others are down and late (rule 5).
func (s *schedule) settle(now time.Time) {
	failed := s.bestFailure() >= 0
	left := func(t try) bool { return !t.done && (!failed || t.standing.state < Down || !t.isLate(now)) }
	if s.next() < 0 || !slices.ContainsFunc(s.tries, left) {
		s.giveUp(nil)
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

// win makes a usable reply the answer of the query.
func (s *schedule) win(o outcome) {
	s.over, s.winner, s.reply, s.noOPT = true, o.try, o.reply, o.noOPT
	s.provisional = s.inOrder() && slices.ContainsFunc(s.tries[:o.try], func(t try) bool { return !t.disclaims() })
}

// giveUp ends the query with the best result so far: a truncated or held reply, or the best failure. If there is
// none of these, the query ends without a reply; cause says why.
func (s *schedule) giveUp(cause error) {
	cut := slices.IndexFunc(s.tries, func(t try) bool { return t.truncated.reply != nil })
	switch {
	case cut >= 0:
		s.win(s.tries[cut].truncated)
	case s.held.reply != nil:
		s.win(s.held)
	default:
		s.over, s.cause = true, cause
		if best := s.bestFailure(); best >= 0 {
			s.reply, s.winner = s.tries[best].failure, best
		}
	}
}

// The next methods implement rule 6, which is about answers of servers other than the first.

// inOrder reports whether rule 6 applies.
func (s *schedule) inOrder() bool { return !s.options.Fastest && !s.sendOnce }

// outranked reports whether a server before the i-th may still send an answer.
func (s *schedule) outranked(i int) bool {
	return s.inOrder() && slices.ContainsFunc(s.tries[:i], func(t try) bool { return t.mayKnow() })
}

// hold keeps a negative answer until all earlier servers have answered,
// failed or fallen silent. It asks the earlier servers that were not asked yet.
func (s *schedule) hold(o outcome, now time.Time) {
	s.tries[o.try].done = true
	if s.held.reply != nil && s.held.try < o.try {
		return
	}
	s.held = o
	s.lateAt = earlier(s.lateAt, now.Add(s.tries[o.try].standing.lateAfter))
	for i := range o.try {
		if t := &s.tries[i]; t.sends == 0 && t.mayKnow() {
			s.send(i, now)
		}
	}
}

// precedes reports whether t must be asked before other, whatever their order in the configuration. This is so if t was
// asked fewer times, or if rule 3 puts it first. If byTime is true, SRTT counts for rule 3.
func (t *try) precedes(other *try, byTime bool) bool {
	x, y := t.standing, other.standing
	switch {
	case t.sends != other.sends:
		return t.sends < other.sends
	case x.state != y.state:
		return x.state < y.state
	case x.silent != y.silent:
		return y.silent
	}
	return byTime && x.rtt < y.rtt
}

// isLate reports whether the server is late (rule 1), counted from when the query was first sent to it.
func (t *try) isLate(now time.Time) bool {
	return t.sends > 0 && !now.Before(t.first.Add(t.standing.lateAfter))
}

// mayKnow reports whether a server may have an answer: it lives and has not replied yet, or it has sent a truncated
// reply.
func (t *try) mayKnow() bool { return t.truncated.reply != nil || !t.done && t.standing.lives() }

// disclaims reports whether a server has replied that it does not answer such questions. A server for
// internal names replies this to a question for any other name.
func (t *try) disclaims() bool {
	return t.failure != nil && (t.code == dns.RcodeRefused || t.code == dns.RcodeNotImplemented)
}

// text describes the outcome.
func (o *outcome) text() string {
	switch {
	case o.err != nil:
		return cause(o.err).Error()
	case o.reading.err != nil:
		return ErrMalformed.Error() + ": " + o.reading.err.Error()
	}
	text := wire.RcodeName(o.reading.code)
	if o.reading.truncated {
		text += ", truncated"
	}
	return text
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
