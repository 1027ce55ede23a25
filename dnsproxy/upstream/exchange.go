package upstream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// How says over what a query goes. TLS servers are always asked over TLS.
type How int

const (
	// UDPThenTCP asks over UDP, and over TCP if the reply is truncated; without
	// TCP the truncated reply is the answer.
	UDPThenTCP How = iota
	// UDPOnly asks over UDP; a truncated reply is the answer.
	UDPOnly
	// TCPOnly asks over TCP.
	TCPOnly

	// Verbatim may be added to any of these: what is sent is the query as it is, but for
	// its ID, whatever Config.MixCase says and the server makes of EDNS, and what is
	// returned is the reply as it came, but for its ID, in whatever case its question is.
	Verbatim How = 1 << 4
)

// Exchange returns the first usable reply (NOERROR, NXDOMAIN; any to an opcode
// other than QUERY) to a query in wire form, and who sent it. If all servers fail
// it is the best failure: SERVFAIL, REFUSED, NOTIMP, FORMERR, others. If there is
// no reply at all the error names every server with its cause; errors.Is finds
// ErrNoServers, ErrLoop, ErrTimeout, ErrOverload and what package net says.
//
// The query has at most one question and is not changed. The reply has its ID and
// its question (but see Verbatim), and is the caller's. Without Config.Check it may be malformed behind its
// question. With Config.MixCase names in it may be in mixed case.
func (g *Group) Exchange(ctx context.Context, query []byte, how How) ([]byte, Spec, error) {
	answer, err := g.Ask(ctx, query, how)
	return answer.Reply, answer.Server, err
}

// An Answer is what [Group.Ask] returns.
type Answer struct {
	Reply  []byte
	Server Spec // that sent Reply
	// Unsure says that Reply says that there is nothing, and that a server that stands
	// before Server, and may know more (rule 12), has failed to answer.
	Unsure bool
}

// Ask is Exchange, and says how sure the reply is.
func (g *Group) Ask(ctx context.Context, query []byte, how How) (Answer, error) {
	if len(g.servers) == 0 {
		return Answer{}, ErrNoServers
	}
	if g.refuses() {
		return Answer{}, ErrOverload
	}
	g.waiting.Add(1)
	defer g.waiting.Add(-1)
	e := g.client.newExchange()
	defer e.release()
	if err := e.begin(g, query, how); err != nil {
		return Answer{}, err
	}
	e.start(time.Now())
	for !e.over {
		select {
		case <-e.wake:
			e.receive(time.Now())
		case <-e.timer.C:
			e.tick(time.Now())
		case <-ctx.Done():
			e.giveUp(ctx.Err())
		}
	}
	if e.reply == nil {
		return Answer{}, e.err
	}
	if e.verbatim {
		copy(e.reply, query[:2])
	} else {
		e.reply = restore(e.reply, query, e.question)
	}
	return Answer{Reply: e.reply, Server: e.tries[e.winner].server.spec, Unsure: e.unsure()}, nil
}

// A try is what a query knows of a server.
type try struct {
	server   *server
	standing standing
	asked    int
	first    time.Time // when it was asked first
	failed   bool      // it is not asked again
	err      error
	failure  []byte
	code     int    // of failure
	garbled  bool   // it sent a malformed reply
	cut      []byte // truncated reply, while TCP is tried
	stream   bool   // ask over TCP
	plain    bool   // ask without EDNS
	unsure   bool   // it was asked without EDNS for once

	copied bool      // it was sent a copy, whose outcomes are not looked at yet
	held   []outcome // those
}

// An outcome is what became of an attempt.
type outcome struct {
	try           int
	reply         []byte
	reading       reading // of reply
	err           error
	stream, plain bool
}

// An exchange is one query until it is answered. One goroutine has it; others
// deliver outcomes.
type exchange struct {
	client     *Client
	group      *Group
	generation atomic.Uint64 // of outcomes that are wanted; changed with mu held
	wake       chan struct{} // has an element when there are outcomes
	timer      *time.Timer   // at the next of late and deadline

	mu       sync.Mutex
	outcomes []outcome

	spare    []outcome
	packet   []byte // the query as it is sent
	query    []byte
	question []byte
	how      How  // without Verbatim
	verbatim bool // how with Verbatim
	options  Options
	tries    []try
	slot     uint32
	deadline time.Time
	late     time.Time // when the next server is asked
	cutUntil time.Time // when a truncated reply is good enough; zero if there is none
	maxWait  time.Duration
	repeated bool // because a server was late

	held      int // the server whose reply is held, -1 if none is (rule 12)
	heldReply []byte

	over     bool
	reply    []byte
	winner   int
	negative bool // the last usable reply says that there is nothing
	err      error
}

func (c *Client) newExchange() *exchange {
	if e, ok := c.exchanges.Get().(*exchange); ok {
		return e
	}
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return &exchange{client: c, wake: make(chan struct{}, 1), timer: timer}
}

// release ends the interest in outcomes and returns e to the pool.
func (e *exchange) release() {
	e.timer.Stop()
	e.mu.Lock()
	e.generation.Add(1)
	clear(e.outcomes)
	e.outcomes = e.outcomes[:0]
	select {
	case <-e.wake:
	default:
	}
	e.mu.Unlock()
	clear(e.tries)
	e.tries = e.tries[:0]
	e.heldReply, e.cutUntil, e.negative = nil, time.Time{}, false
	e.group, e.query, e.question, e.reply, e.err, e.over, e.repeated, e.winner = nil, nil, nil, nil, nil, false, false, 0
	e.client.keep(e)
}

// deliver hands an outcome to the exchange, unless it is over.
func (e *exchange) deliver(generation uint64, o outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.generation.Load() != generation {
		return
	}
	e.outcomes = append(e.outcomes, o)
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// begin takes over a query.
func (e *exchange) begin(g *Group, query []byte, how How) error {
	if len(query) < headerLen || len(query) > maxMessage {
		return errMalformedQuery
	}
	end, ok := questionEnd(query)
	if !ok {
		return errMalformedQuery
	}
	e.group, e.query, e.question, e.options = g, query, query[headerLen:end], g.options
	e.how, e.verbatim = how&^Verbatim, how&Verbatim != 0
	e.slot, e.held = rand.Uint32(), -1
	for _, s := range g.servers {
		e.tries = append(e.tries, try{server: s, stream: s.udp == nil || e.how == TCPOnly || g.options.UseVC})
	}
	e.deadline = time.Now().Add(g.timeout)
	return nil
}

// start asks the best server, and those that get a copy (rules 4, 6, 7, 8).
func (e *exchange) start(now time.Time) {
	e.look(now)
	e.maxWait = maxLate
	all := e.options.Parallel
	if !e.any(func(t *try) bool { return t.standing.state < Down }) {
		e.maxWait, all = maxDownWait, true
	}
	first := e.next()
	for i := range e.tries {
		t := &e.tries[i]
		switch {
		case t.standing.state == Looping:
			t.server.probeAgain(now)
		case i == first || e.once():
		case t.server.copyDue(now):
			t.copied = !all
			e.ask(i, now)
		case all:
			e.ask(i, now)
		}
	}
	if first < 0 {
		e.settle(now)
		return
	}
	e.advance(first, now)
}

// look refreshes what is known of the servers. One that was found to loop meanwhile
// has failed.
func (e *exchange) look(now time.Time) {
	for i := range e.tries {
		t := &e.tries[i]
		// Without use-vc a server lives that answers over UDP: TCP to it may be blocked.
		t.standing = t.server.standing(now, e.options.UseVC)
		if t.standing.state == Looping {
			t.failed, t.err = true, ErrLoop
		}
	}
}

// any reports whether there is such a server among those that have not failed.
func (e *exchange) any(is func(*try) bool) bool {
	for i := range e.tries {
		if !e.tries[i].failed && is(&e.tries[i]) {
			return true
		}
	}
	return false
}

// once reports whether the message must not be sent twice (rule 11).
func (e *exchange) once() bool { return e.query[2]&opcodeMask != 0 }

// advance asks a server and says when it is late.
func (e *exchange) advance(i int, now time.Time) {
	t := &e.tries[i]
	e.late = now.Add(min(t.standing.late<<min(t.asked, 8), e.maxWait))
	e.ask(i, now)
	e.setTimer(now)
}

func (e *exchange) setTimer(now time.Time) {
	next := minTime(e.late, e.deadline)
	if !e.cutUntil.IsZero() {
		next = minTime(next, e.cutUntil)
	}
	e.timer.Reset(next.Sub(now))
}

// ask sends the query to a server.
func (e *exchange) ask(i int, now time.Time) {
	t := &e.tries[i]
	if t.asked == 0 {
		t.first = now
	}
	t.asked++
	plain, folded := t.server.quirks(now)
	a := e.client.newAttempt(t.server)
	a.exchange, a.generation, a.try = e, e.generation.Load(), i
	a.slot, a.sent, a.stream, a.again = e.slot, now, t.stream, t.asked > 1
	e.slot++
	e.packet = append(e.packet[:0], e.query...)
	if a.edns = endsInOPT(e.packet); a.edns && !e.verbatim && (plain || t.plain || e.tryPlain(t)) {
		e.packet, a.plain, a.edns = cutOPT(e.packet), true, false
	}
	question := e.packet[headerLen : headerLen+len(e.question)]
	if e.client.config.MixCase && !folded && !t.stream && !e.verbatim {
		mixCase(question)
	}
	a.verbatim = e.verbatim
	a.opcode, a.question = e.query[2]&opcodeMask, append(a.question, question...)
	t.server.sent(now)
	t.server.carrier(a.stream).send(a, e.packet)
}

// tryPlain reports whether a server is asked without EDNS for once, since it may be that
// which is lost on the way: the third time, if nothing with EDNS has come back since the
// query began. An answer without signatures is of no use to who wants them.
func (e *exchange) tryPlain(t *try) bool {
	const third = 3
	if t.asked == third && !wantsDNSSEC(e.query) && t.server.mutesEDNS(t.first) {
		t.unsure = true
	}
	return t.unsure && t.asked == third
}

// tick is called when a server is late, or the time is up.
func (e *exchange) tick(now time.Time) {
	if !now.Before(e.deadline) {
		e.giveUp(ErrTimeout)
		return
	}
	e.look(now)
	if e.ended(now) {
		return
	}
	if !e.cutUntil.IsZero() && !now.Before(e.cutUntil) {
		e.giveUp(ErrTimeout) // with the truncated reply
		return
	}
	if now.Before(e.late) {
		e.setTimer(now)
		return
	}
	i := e.next()
	if e.once() || !e.mayRepeat(i, now) {
		e.late = now.Add(e.maxWait)
		e.setTimer(now)
		return
	}
	e.repeated = true
	e.tries[i].server.hedges.Add(1)
	e.advance(i, now)
}

// mayRepeat is rule 10.
func (e *exchange) mayRepeat(i int, now time.Time) bool {
	st := &e.tries[i].standing
	return !e.repeated && st.state < Down && !st.silent || e.group.budget.take(now)
}

// receive takes the outcomes that were delivered.
func (e *exchange) receive(now time.Time) {
	e.mu.Lock()
	outcomes := e.outcomes
	e.outcomes = e.spare[:0]
	e.mu.Unlock()
	for _, o := range outcomes {
		if !e.over {
			e.handle(o, now)
		}
	}
	clear(outcomes)
	e.spare = outcomes[:0]
}

// handle takes one outcome.
func (e *exchange) handle(o outcome, now time.Time) {
	t := &e.tries[o.try]
	switch {
	case t.copied:
		t.held = append(t.held, o)
	case errors.Is(o.err, errCase):
		t.server.rememberFolded(now)
		e.again(o.try, now, &t.stream)
	case o.err != nil && t.cut != nil && o.stream:
		e.win(o.try, t.cut)
	case o.err != nil:
		t.err = cause(o.err)
		e.fail(o.try, now)
	case o.reading.usable() && truncated(o.reply) && !o.stream && e.how == UDPThenTCP:
		t.cut = o.reply
		if e.cutUntil.IsZero() {
			e.cutUntil = now.Add(cutWait)
		}
		e.again(o.try, now, &t.stream)
	case o.reading.usable():
		if o.plain && (t.plain || t.unsure && t.server.mutesEDNS(t.first)) {
			t.server.rememberPlain(now)
		}
		e.negative = o.reading.negative
		if e.negative && e.outranked(o.try, now) {
			e.hold(o.try, o.reply, now)
			return
		}
		e.win(o.try, o.reply)
	case o.reading.err != nil:
		t.garbled, t.err = true, fmt.Errorf("%w: %w", ErrMalformed, o.reading.err)
		t.server.garbled(t.err)
		e.fail(o.try, now)
	case o.reading.rejectsEDNS() && !o.plain && !e.verbatim && endsInOPT(e.query):
		e.again(o.try, now, &t.plain)
	default:
		t.failure, t.code = o.reply, o.reading.code
		t.server.note("response code " + strconv.Itoa(o.reading.code))
		e.fail(o.try, now)
	}
}

// useCopies takes the outcomes of copies, now that the server that was asked is late
// or has failed (rule 6).
func (e *exchange) useCopies(now time.Time) {
	for i := range e.tries {
		t := &e.tries[i]
		held := t.held
		t.copied, t.held = false, nil
		for _, o := range held {
			if !e.over {
				e.handle(o, now)
			}
		}
	}
}

// again asks a server once more, and from now on, in another way.
func (e *exchange) again(i int, now time.Time, way *bool) {
	if *way {
		return // it was, when another attempt ended in the same way
	}
	*way = true
	t := &e.tries[i]
	e.late = now.Add(t.standing.late)
	e.ask(i, now)
	e.setTimer(now)
}

// fail moves on to the next server (rule 5).
func (e *exchange) fail(i int, now time.Time) {
	e.tries[i].failed = true
	if e.ended(now) {
		return
	}
	if next := e.next(); e.tries[next].asked == 0 {
		e.advance(next, now)
	}
}
