package upstream

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// UDPThenTCP asks over UDP, and over TCP if the reply is truncated. If no server sends
	// a whole reply, the truncated reply is the answer.
	UDPThenTCP Mode = iota
	// UDPOnly asks over UDP; a truncated reply is the answer.
	UDPOnly
	// TCPThenUDP asks over TCP, and over UDP in turn if a server is late or cannot be reached over TCP. It is otherwise
	// like UDPThenTCP.
	TCPThenUDP

	// Verbatim may be added to any of these. Then only the ID of the query and of the reply is changed. The query keeps
	// its OPT record even if the server does not support EDNS, and the reply keeps the case of its question, which may
	// differ from the query's.
	Verbatim Mode = 1 << 4
	// Traced may be added, too. Then the answer's Attempts are complete.
	Traced Mode = 1 << 5
)

// A Mode says how a query is sent. TLS servers are always asked over TLS.
type Mode int

// A Receiver gets the result of a query.
type Receiver interface {
	// Receive takes the answer of a query, or the error if there is none. It is called once, from any
	// goroutine, perhaps before [Group.Start] returns. It must not block: it runs on the goroutine that
	// reads a nameserver's socket.
	Receive(answer Answer, err error)
}

// An Answer is the reply to a query, and how it came about.
type Answer struct {
	Reply []byte
	// Server is the name of the server that sent Reply, in the form of [Spec.String]. All answers of a server share
	// one string.
	Server string
	// Provisional reports that an earlier server in the order of configuration may have another answer
	// (rule 6). A cache must keep Reply for 30 s at most, must not prolong it, and must not serve it stale.
	Provisional bool
	// Plain reports that the query was sent without its OPT record. If the query asks for
	// signatures, Reply lacks them.
	Plain bool
	// Attempts describes what was sent to servers, and the results.
	//
	// If the query is Traced, Attempts has everything that was sent, in order, and then the servers that were not
	// asked. It is set even if there is no Reply. If the query is not Traced, Attempts is set only if Reply is a
	// failure or took long. Then it has one element for each server that was asked or could not be asked.
	Attempts []Attempt
}

// tellAfter is how long an answer takes before it has Attempts even if the query is not Traced.
const tellAfter = 500 * time.Millisecond

// A Call is a query that was sent by [Group.Start].
type Call struct {
	exchange   *exchange
	generation uint64
	trace      *trace
}

// Cancel ends the query if it is not over. Its receiver is not called any more, unless a call is about to happen.
func (s Call) Cancel() {
	if s.exchange != nil {
		s.exchange.notify(s.generation, func(e *exchange) { e.cancelled = true })
	}
}

// Attempts returns what was sent so far, if the query is Traced.
func (s Call) Attempts() []Attempt { return s.trace.soFar(time.Now()) }

// An exchange is one query in flight. It has no goroutine of its own, and runs only when there is an event. The
// events are its start, the outcomes of its attempts, its timer and its cancellation. The goroutine that causes an
// event runs the exchange. If another goroutine is running the exchange at the moment, that goroutine handles the
// event.
type exchange struct {
	shared     *shared
	generation atomic.Uint64 // grows with each query: events of earlier queries are ignored; changed with mu held

	mu        sync.Mutex
	busy      bool // a goroutine runs the exchange; only this goroutine may use the fields from receiver on
	outcomes  []outcome
	due       bool // the timer has fired
	cancelled bool

	receiver Receiver
	spare    []outcome // memory for the next outcomes
	query    []byte
	question []byte
	verbatim bool
	slot     uint32
	schedule schedule
	servers  []*server // of the schedule, by the same index
	timer    timer
	deliver  func(generation uint64, o outcome) // takes the outcome of an attempt; never changes
	trace    *trace                             // nil unless the query is Traced
}

// newExchange returns an exchange from the pool.
func newExchange(c *shared) *exchange {
	if e, ok := c.exchanges.Get().(*exchange); ok {
		return e
	}
	e := &exchange{shared: c}
	e.deliver = func(generation uint64, o outcome) {
		e.notify(generation, func(e *exchange) { e.outcomes = append(e.outcomes, o) })
	}
	e.timer.notify = func(generation uint64) { e.notify(generation, func(e *exchange) { e.due = true }) }
	return e
}

// finish makes e ignore all later events of its query, and returns e to the pool.
func (e *exchange) finish() {
	e.shared.wheel.stop(&e.timer)
	e.mu.Lock()
	e.generation.Add(1)
	clear(e.outcomes)
	e.outcomes, e.due, e.cancelled, e.busy = e.outcomes[:0], false, false, false
	clear(e.servers)
	e.servers, e.query, e.question = e.servers[:0], nil, nil
	e.receiver, e.trace = nil, nil
	e.schedule.reset()
	e.mu.Unlock()
	e.shared.exchanges.Put(e)
}

// notify passes an event to the exchange. With mu held, it calls the function record, which stores the event in the
// exchange. Then it runs the exchange, unless another goroutine is running it. If the exchange is over, notify does
// nothing.
func (e *exchange) notify(generation uint64, record func(*exchange)) {
	e.mu.Lock()
	if e.generation.Load() != generation {
		e.mu.Unlock()
		return
	}
	record(e)
	running := e.busy
	e.busy = true
	e.mu.Unlock()
	if !running {
		e.drive()
	}
}

// drive runs the exchange until no event is left. The caller has set busy.
func (e *exchange) drive() {
	for {
		if e.schedule.over {
			answer, err := e.result()
			e.receiver.Receive(answer, err)
			e.finish()
			return
		}
		e.mu.Lock()
		outcomes, due := e.outcomes, e.due
		if e.cancelled {
			e.mu.Unlock()
			e.finish()
			return
		}
		if len(outcomes) == 0 && !due {
			e.busy = false
			e.mu.Unlock()
			return
		}
		e.outcomes, e.spare, e.due = e.spare[:0], nil, false
		e.mu.Unlock()
		now := time.Now()
		e.receive(outcomes, now)
		if due && !e.schedule.over {
			e.timerFired(now)
		}
	}
}

// begin prepares the exchange for a query.
func (e *exchange) begin(g *Group, query []byte, mode Mode) error {
	if len(query) < wire.HeaderLen || len(query) > dns.MaxMsgSize {
		return errMalformedQuery
	}
	end, ok := questionEnd(query)
	if !ok {
		return errMalformedQuery
	}
	e.query, e.question = query, query[wire.HeaderLen:end]
	e.verbatim, e.slot = mode&Verbatim != 0, rand.Uint32()
	if mode&Traced != 0 {
		e.trace = new(trace)
	}
	mode &^= Verbatim | Traced
	s := &e.schedule
	s.reset()
	s.options, s.deadline = g.options, time.Now().Add(g.timeout)
	s.sendOnce, s.retryTCP, s.edns = !isQuery(query), mode != UDPOnly, !e.verbatim && wire.EndsInOPT(query)
	for _, server := range g.servers {
		e.servers = append(e.servers, server)
		only := server.udp == nil || g.options.UseVC
		s.tries = append(s.tries, try{stream: only || mode == TCPThenUDP, inTurn: !only && mode == TCPThenUDP})
	}
	return nil
}

func (e *exchange) start(now time.Time) {
	e.updateStandings(now)
	for i := range e.servers {
		if e.schedule.tries[i].standing.state == Looping {
			e.servers[i].loopProbeAgain(now)
		}
	}
	e.schedule.start(now)
	e.carryOut(now)
}

// updateStandings passes the current standing of each server to the schedule.
func (e *exchange) updateStandings(now time.Time) {
	for i := range e.servers {
		e.schedule.setStanding(i, e.servers[i].standing(now))
	}
}

// timerFired is called after the timer has fired.
func (e *exchange) timerFired(now time.Time) {
	if !e.schedule.expired(now) {
		e.updateStandings(now)
	}
	e.schedule.wake(now)
	e.carryOut(now)
}

// receive passes outcomes to the schedule.
func (e *exchange) receive(outcomes []outcome, now time.Time) {
	for _, o := range outcomes {
		if e.schedule.over {
			break
		}
		if o.err != nil || !o.reading.usable() {
			e.updateStandings(now)
		}
		e.trace.addOutcome(&o, now)
		e.schedule.receive(o, now)
		e.carryOut(now)
	}
	clear(outcomes)
	e.spare = outcomes[:0]
}

// carryOut carries out the actions of the schedule and sets the timer.
func (e *exchange) carryOut(now time.Time) {
	for _, action := range e.schedule.actions {
		s, t := e.servers[action.try], &e.schedule.tries[action.try]
		switch action.kind {
		case actSend:
			e.send(action.try, now)
		case actHedge:
			s.hedges.Add(1)
			e.trace.markRepeated()
		case actMalformed:
			s.noteMalformed(t.err)
		case actFailure:
			s.setLastError(wire.RcodeName(t.code))
		}
	}
	e.schedule.actions = e.schedule.actions[:0]
	if !e.schedule.over {
		e.shared.wheel.set(&e.timer, e.schedule.wakeAt(), e.generation.Load())
	}
}

// When a query is sent to a server for the third time, its OPT record is left out, because a middlebox may drop packets
// with OPT records. A client that wants signatures has little use for an answer without them.
const plainFrom = 3

// send sends the query to a server.
func (e *exchange) send(i int, now time.Time) {
	s, t := e.servers[i], &e.schedule.tries[i]
	a := newAttempt(s)
	a.deliver, a.current, a.generation, a.try = e.deliver, &e.generation, e.generation.Load(), i
	a.slot, a.sent, a.stream, a.sends = e.slot, now, t.stream, t.sends
	e.slot++
	buffer := e.shared.takePacket(e.query)
	defer e.shared.keepPacket(buffer)
	packet := *buffer
	if e.schedule.edns && (t.noOPT || t.sends >= plainFrom && !wire.WantsDNSSEC(e.query)) {
		packet, a.noOPT = wire.CutOPT(packet), true
	}
	question := packet[wire.HeaderLen : wire.HeaderLen+len(e.question)]
	a.failedForOthers = e.failedForOthers(i)
	a.opcode, a.question = opcode(e.query), append(a.question, question...)
	e.trace.addAttempt(a, earlier(e.schedule.lateAt, e.schedule.deadline).Sub(now))
	s.sent(now)
	s.owes.Add(1)
	s.carrier(a.stream).send(a, packet)
}

// failedForOthers reports whether another server, which answers other questions, has failed for this question. If so, the
// question is the likely reason if server i fails, too.
func (e *exchange) failedForOthers(i int) bool {
	for other := range e.schedule.tries {
		if other != i && e.schedule.tries[other].failure != nil && !e.servers[other].refuses() {
			return true
		}
	}
	return false
}

// result returns the answer, or the error if there is none. The schedule must be over.
func (e *exchange) result() (Answer, error) {
	s := &e.schedule
	if s.reply == nil {
		return Answer{Attempts: e.traced(time.Now())}, e.noReply()
	}
	reply := s.reply
	if e.verbatim {
		copy(reply, e.query[:2])
	} else {
		reply = restore(reply, e.query, e.question)
	}
	return Answer{Reply: reply, Server: e.servers[s.winner].name, Provisional: s.provisional, Plain: s.noOPT,
		Attempts: e.attempts(time.Now())}, nil
}

// attempts returns [Answer.Attempts] of an exchange that has a reply.
func (e *exchange) attempts(now time.Time) []Attempt {
	if e.trace != nil {
		return e.traced(now)
	}
	s := &e.schedule
	first := now
	for i := range s.tries {
		if t := &s.tries[i]; t.sends > 0 && t.first.Before(first) {
			first = t.first
		}
	}
	if s.tries[s.winner].failure == nil && now.Sub(first) < tellAfter {
		return nil
	}
	all := make([]Attempt, 0, len(s.tries))
	for i := range s.tries {
		t, made := &s.tries[i], Attempt{Server: e.servers[i].name, Used: i == s.winner}
		if t.sends > 0 {
			made.Protocol = e.servers[i].protocol(t.stream)
			made.Sent, made.Took = seconds(t.first.Sub(first)), seconds(now.Sub(t.first))
		}
		switch {
		case made.Used:
			made.Result = wire.RcodeName(int(s.reply[wire.FlagsOffset+1] & 0x0f))
		case t.failure != nil:
			made.Result = wire.RcodeName(t.code)
		case t.err != nil:
			made.Result = t.err.Error()
		case t.sends == 0:
			continue
		}
		all = append(all, made)
	}
	return all
}

// strays is appended to the cause of a server that has sent packets, but no reply to a query in flight.
const strays = ", only packets that are no reply to a query in flight"

// noReply returns the error of an exchange that is over, with the cause for each server.
func (e *exchange) noReply() *noReply {
	var text strings.Builder
	text.WriteString("no nameserver answered")
	separator := ": "
	err := &noReply{}
	for i := range e.servers {
		cause := e.schedule.tries[i].err
		if cause == nil {
			cause = e.schedule.cause
		}
		if cause == nil {
			continue
		}
		text.WriteString(separator)
		text.WriteString(e.servers[i].name + ": " + cause.Error())
		if t := &e.schedule.tries[i]; t.sends > 0 && errors.Is(cause, ErrTimeout) && e.servers[i].strayedSince(t.first) {
			text.WriteString(strays)
		}
		separator = "; "
		err.causes = append(err.causes, cause)
	}
	err.text = text.String()
	return err
}

// traced returns the attempts of an exchange that is over, and then the servers that were not asked. It returns nil
// if the query is not Traced.
func (e *exchange) traced(now time.Time) []Attempt {
	t := e.trace
	if t == nil {
		return nil
	}
	all := t.soFar(now)
	s := &e.schedule
	if s.reply != nil {
		for i := len(all) - 1; i >= 0; i-- {
			if t.attempts[i].try == s.winner && all[i].Result != "" {
				all[i].Used = true
				break
			}
		}
	}
	for i := range s.tries {
		if try := &s.tries[i]; try.sends == 0 {
			reason := try.standing.state.String()
			if try.err != nil {
				reason = try.err.Error()
			}
			all = append(all, Attempt{Server: e.servers[i].name, Result: reason})
		}
	}
	return all
}
