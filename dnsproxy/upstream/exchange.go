package upstream

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// How tells how a query is sent. TLS servers are always asked over TLS.
type How int

const (
	// UDPThenTCP asks over UDP, and over TCP if the reply is truncated. If TCP fails
	// the truncated reply is the answer.
	UDPThenTCP How = iota
	// UDPOnly asks over UDP; a truncated reply is the answer.
	UDPOnly
	// TCPOnly asks over TCP.
	TCPOnly

	// Verbatim may be added to any of these. The query is sent as it is except for its ID,
	// whatever Config.MixCase is and whether the server handles EDNS or not. The reply is
	// returned as it was received except for its ID; its question may be in another case.
	Verbatim How = 1 << 4
)

// Exchange sends a query in wire form and returns the first usable reply (NOERROR or
// NXDOMAIN; any reply to an opcode other than QUERY) and the server that sent it. If all
// servers fail it returns the best failure: SERVFAIL, REFUSED, NOTIMP, FORMERR, others. If
// there is no reply at all the error names every server with its cause; errors.Is finds
// ErrNoServers, ErrLoop, ErrTimeout, ErrOverload and the errors of package net.
//
// The query must have at most one question; it is not changed. The reply belongs to the
// caller and has the query's ID and question (but see Verbatim). Without Config.Check it may
// be malformed behind its question. With Config.MixCase names in it may be in mixed case.
func (g *Group) Exchange(ctx context.Context, query []byte, how How) ([]byte, Spec, error) {
	answer, err := g.Ask(ctx, query, how)
	return answer.Reply, answer.Server, err
}

// An Answer is what [Group.Ask] returns.
type Answer struct {
	Reply  []byte
	Server Spec // that sent Reply
	// Unsure reports that Reply is a negative answer, and that a server that stands before
	// Server and may have had an answer failed to reply (rule 12).
	Unsure bool
}

// Ask is Exchange, and tells how sure the reply is.
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
	for !e.schedule.over {
		select {
		case <-e.wake:
			e.receive(time.Now())
		case <-e.timer.C:
			e.tick(time.Now())
		case <-ctx.Done():
			e.giveUp(ctx.Err(), time.Now())
		}
	}
	return e.answer()
}

// An exchange is one query until it is answered: it does what its schedule decides. One
// goroutine has it; others deliver outcomes.
type exchange struct {
	client     *Client
	generation atomic.Uint64 // of the outcomes that are awaited; changed with mu held
	wake       chan struct{} // has an element when there are outcomes
	timer      *time.Timer   // fires at armed
	armed      time.Time

	mu       sync.Mutex
	outcomes []outcome

	spare    []outcome
	packet   []byte // the query as it is sent
	query    []byte
	question []byte
	verbatim bool
	slot     uint32
	schedule schedule
	servers  []peer // those of the schedule, by the same index
}

// A peer is a server that may be asked.
type peer struct {
	*server
	triedPlain bool // it was asked without EDNS for once
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
	clear(e.servers)
	e.servers, e.query, e.question, e.armed = e.servers[:0], nil, nil, time.Time{}
	e.schedule.reset()
	e.client.keep(e)
}

// deliver passes an outcome to the exchange, unless that is over.
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
	if len(query) < wire.HeaderLen || len(query) > dns.MaxMsgSize {
		return errMalformedQuery
	}
	end, ok := questionEnd(query)
	if !ok {
		return errMalformedQuery
	}
	e.query, e.question = query, query[wire.HeaderLen:end]
	e.verbatim, e.slot = how&Verbatim != 0, rand.Uint32()
	how &^= Verbatim
	s := &e.schedule
	s.reset()
	s.options, s.budget, s.deadline, s.random = g.options, &g.budget, time.Now().Add(g.timeout), rand.Uint64()
	s.once, s.overTCP, s.edns = !isQuery(query), how == UDPThenTCP, !e.verbatim && wire.EndsInOPT(query)
	for _, server := range g.servers {
		e.servers = append(e.servers, peer{server: server})
		s.tries = append(s.tries, try{stream: server.udp == nil || how == TCPOnly || g.options.UseVC})
	}
	return nil
}

func (e *exchange) start(now time.Time) {
	e.look(now)
	for i := range e.servers {
		if e.schedule.tries[i].standing.state == Looping {
			e.servers[i].loopProbeAgain(now)
		}
	}
	e.schedule.start(now, func(i int) bool { return e.servers[i].copyDue(now) })
	e.carryOut(now)
}

// look tells the schedule how the servers are doing.
func (e *exchange) look(now time.Time) {
	for i := range e.servers {
		// A server that answers over UDP is alive, although TCP to it may be blocked; so
		// probes go over TCP only with use-vc.
		e.schedule.see(i, e.servers[i].standing(now, e.schedule.options.UseVC))
	}
}

// tick is called when the timer fires.
func (e *exchange) tick(now time.Time) {
	if !e.schedule.expired(now) {
		e.look(now)
	}
	e.schedule.wake(now)
	e.armed = time.Time{}
	e.carryOut(now)
}

// receive passes the outcomes that were delivered to the schedule.
func (e *exchange) receive(now time.Time) {
	e.mu.Lock()
	outcomes := e.outcomes
	e.outcomes = e.spare[:0]
	e.mu.Unlock()
	for _, o := range outcomes {
		if e.schedule.over {
			break
		}
		if o.err != nil || !o.reading.usable() {
			e.look(now)
		}
		e.schedule.receive(o, now)
		e.carryOut(now)
	}
	clear(outcomes)
	e.spare = outcomes[:0]
}

func (e *exchange) giveUp(cause error, now time.Time) {
	e.schedule.giveUp(cause, now)
	e.carryOut(now)
}

// carryOut carries out the actions of the schedule and sets the timer.
func (e *exchange) carryOut(now time.Time) {
	for _, action := range e.schedule.actions {
		s, t := e.servers[action.try].server, &e.schedule.tries[action.try]
		switch action.kind {
		case actSend:
			e.send(action.try, now)
		case actHedge:
			s.hedges.Add(1)
		case actFolds:
			s.rememberFolded(now)
		case actAnsweredPlain:
			if t.plain || e.servers[action.try].triedPlain && s.dropsEDNS(t.first) {
				s.rememberPlain(now)
			}
		case actMalformed:
			s.noteMalformed(t.err)
		case actFailure:
			s.note("response code " + strconv.Itoa(t.code))
		case actFailedAlone:
			s.noteFailedAlone()
		case actLateAlone:
			s.noteLateAlone()
		}
	}
	e.schedule.actions = e.schedule.actions[:0]
	if at := e.schedule.wakeAt(); !e.schedule.over && at != e.armed {
		e.armed = at
		e.timer.Reset(at.Sub(now))
	}
}

// send sends the query to a server.
func (e *exchange) send(i int, now time.Time) {
	s, t := e.servers[i].server, &e.schedule.tries[i]
	plain, folded := s.quirks(now)
	a := e.client.newAttempt(s)
	a.exchange, a.generation, a.try = e, e.generation.Load(), i
	a.slot, a.sent, a.stream, a.again = e.slot, now, t.stream, t.asked > 1
	e.slot++
	e.packet = append(e.packet[:0], e.query...)
	if a.edns = wire.EndsInOPT(e.packet); e.schedule.edns && (plain || t.plain || e.tryPlain(i)) {
		e.packet, a.plain, a.edns = wire.CutOPT(e.packet), true, false
	}
	question := e.packet[wire.HeaderLen : wire.HeaderLen+len(e.question)]
	if e.client.latest.Load().MixCase && !folded && !t.stream && !e.verbatim {
		mixCase(question)
	}
	a.verbatim = e.verbatim
	a.opcode, a.question = opcode(e.query), append(a.question, question...)
	s.sent(now)
	s.carrier(a.stream).send(a, e.packet)
}

// tryPlain reports whether a server is asked without EDNS for once, since packets with an
// OPT record may be lost on the way: the third time, if no reply to one has come since the
// query began. A client that wants signatures has no use for an answer without them.
func (e *exchange) tryPlain(i int) bool {
	const third = 3
	t := &e.schedule.tries[i]
	if t.asked != third {
		return false
	}
	if !wire.WantsDNSSEC(e.query) && e.servers[i].dropsEDNS(t.first) {
		e.servers[i].triedPlain = true
	}
	return e.servers[i].triedPlain
}

// answer returns the answer once the schedule is over.
func (e *exchange) answer() (Answer, error) {
	s := &e.schedule
	if s.reply == nil {
		return Answer{}, newNoReply(e)
	}
	reply := s.reply
	if e.verbatim {
		copy(reply, e.query[:2])
	} else {
		reply = restore(reply, e.query, e.question)
	}
	return Answer{Reply: reply, Server: e.servers[s.winner].spec, Unsure: s.unsure()}, nil
}
