package upstream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
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
	// TCPOnly asks over TCP.
	TCPOnly

	// Verbatim may be added to any of these. Then only the ID of the query and of the reply is changed. The query keeps
	// its OPT record even if the server does not support EDNS, and the reply keeps the case of its question, which may
	// differ from the query's.
	Verbatim Mode = 1 << 4
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
	// Call tells what was sent to servers. It is set even if there is no Reply.
	Call Call
}

// A Call is a query that was sent by [Group.Start].
type Call struct{ question *question }

// Cancel ends the query if it is not over. Its receiver is not called any more, unless a call is about to happen.
func (c Call) Cancel() {
	if c.question != nil {
		c.question.mu.Lock()
		defer c.question.mu.Unlock()
		c.question.end()
	}
}

// Attempts returns what was sent so far or until the query was answered, in order, and then the servers that were not
// asked.
func (c Call) Attempts() []Attempt {
	if c.question == nil {
		return nil
	}
	c.question.mu.Lock()
	defer c.question.mu.Unlock()
	return c.question.describe()
}

// A question is a query on its way to servers and back. It has no goroutine of its own: the goroutine that starts it,
// reads a reply or fires its timer takes the next step.
type question struct {
	// These fields never change after Start.
	receiver Receiver
	options  Options
	deadline time.Time
	id       [2]byte // of the query that the group got
	text     []byte  // the question section of the query
	verbatim bool
	once     bool // the query must not be sent twice (rule 8)
	edns     bool // the query has an OPT record that may be left out
	retryTCP bool // after a truncated reply, the query is sent over TCP (rule 8)

	over atomic.Bool // set with mu held: it was answered or cancelled

	mu       sync.Mutex
	query    []byte      // each attempt has another ID
	slot     uint32      // selects the UDP socket of the next attempt
	alarm    *alarm      // nil before the first wait, and at the end
	servers  []candidate // in the order of configuration
	attempts []*attempt  // all that was sent

	// Memory for query, servers and attempts.
	queryRoom   [96]byte
	serverRoom  [2]candidate
	attemptRoom [2]*attempt

	lateAt   time.Time // when the server asked last will be late and the next one is asked
	movesOn  bool      // a server has failed: the next one is asked at once
	answer   *attempt  // its reply is the answer
	ended    time.Time // when the question was answered
	held     *attempt  // a negative reply that is held (rule 6)
	cutUntil time.Time // when a truncated reply becomes the answer; zero if there is none
}

// A candidate is a server that may be asked, and what the question knows about it.
type candidate struct {
	*server
	standing standing  // as last seen by the method proceed
	sends    int       // how often the query was sent to it
	first    time.Time // when the query was first sent to it
	done     bool      // it is not asked again: it has failed, or its reply is held
	again    bool      // it is asked once more at once, over TCP or without EDNS
	stream   bool      // it is asked over a connection the next time
	plain    bool      // it is asked without EDNS

	full    bool     // it was sent enough queries (rule 7)
	err     error    // why it has failed without a reply that can be used
	failure *attempt // has its reply, if that is a failure
	cut     *attempt // has its truncated reply
}

// Start sends a query in wire form and returns. The receiver gets the first usable reply and the name of the server
// that sent it. NOERROR and NXDOMAIN are usable, and any reply to an opcode other than QUERY. If all servers fail, the
// receiver gets the best failure: SERVFAIL before REFUSED, NOTIMP, FORMERR and the rest. If there is no reply at all,
// the receiver gets an error that names every server with its cause; errors.Is finds ErrNoServers, ErrLoop, ErrTimeout,
// ErrSilent and the errors of package net.
//
// The query must have at most one question. Start copies it. The reply belongs
// to the receiver and has the query's ID and question (but see Verbatim). Without Config.Check, the
// reply may be malformed behind its question.
func (g *Group) Start(query []byte, mode Mode, receiver Receiver) Call {
	if len(g.servers) == 0 {
		receiver.Receive(Answer{}, ErrNoServers)
		return Call{}
	}
	end, ok := 0, len(query) >= wire.HeaderLen && len(query) <= dns.MaxMsgSize
	if ok {
		end, ok = questionEnd(query)
	}
	if !ok {
		receiver.Receive(Answer{}, errMalformedQuery)
		return Call{}
	}
	how, now := mode&^Verbatim, time.Now()
	q := &question{
		receiver: receiver, options: g.options, deadline: now.Add(g.timeout), id: [2]byte(query),
		verbatim: mode&Verbatim != 0, once: !isQuery(query), retryTCP: how != UDPOnly,
		slot: rand.Uint32(),
	}
	q.query, q.servers, q.attempts = append(q.queryRoom[:0], query...), q.serverRoom[:0], q.attemptRoom[:0]
	q.text, q.edns = q.query[wire.HeaderLen:end], !q.verbatim && wire.EndsInOPT(query)
	for _, s := range g.servers {
		q.servers = append(q.servers, candidate{server: s, stream: s.udp == nil || g.options.UseVC || how == TCPOnly})
	}
	q.proceed(now, nil, outcome{})
	return Call{q}
}

// proceed takes the next step of a question: at its start, when an attempt has ended, and when the timer has fired. It
// sends what is due, until there is nothing to do but to wait, or the question is over. Then it passes the answer to the
// receiver.
func (q *question) proceed(now time.Time, ended *attempt, o outcome) {
	q.mu.Lock()
	if q.over.Load() {
		q.mu.Unlock()
		return
	}
	if ended != nil {
		q.take(ended, o, now)
	}
	for i := 0; i < len(q.servers) && q.answer == nil; i++ {
		c := &q.servers[i]
		c.standing = c.server.standing(now)
		c.full = c.standing.state == Down && c.owes.Load() >= maxSilent
		switch {
		case c.standing.state == Looping:
			c.probeForLoop(now)
			c.done, c.err = true, ErrLoop
		case c.full && c.sends == 0: // rule 7
			c.done, c.err = true, ErrSilent
		}
	}
	var answer Answer
	var err error
	for over := false; !over; {
		over = true
		switch {
		case q.answer != nil:
			answer = q.win(q.answer)
		case !now.Before(q.deadline), !q.cutUntil.IsZero() && !now.Before(q.cutUntil):
			answer, err = q.giveUp(ErrTimeout)
		case q.held != nil && !q.outranked(q.held.at):
			answer = q.win(q.held)
		case q.settled(now):
			answer, err = q.giveUp(nil)
		default:
			i, repeated := q.due(now)
			if i < 0 {
				q.wait(now)
				q.mu.Unlock()
				return
			}
			q.send(i, repeated, now)
			over = false
		}
	}
	q.ended, answer.Call = now, Call{q}
	q.end()
	q.mu.Unlock()
	q.receiver.Receive(answer, err)
}

// end keeps the question from taking further steps.
func (q *question) end() {
	q.over.Store(true)
	if q.alarm != nil {
		q.alarm.timer.Stop()
		q.alarm.question.Store(nil)
		q.servers[0].client.alarms.Put(q.alarm)
		q.alarm = nil
	}
}

// An alarm is a timer of questions, one after the other. It is pooled, because nearly all timers are stopped before they
// fire. If it fires late, for the next question, that one takes a step at which nothing is due.
type alarm struct {
	timer    *time.Timer
	question atomic.Pointer[question]
}

// fire lets the question take its next step.
func (a *alarm) fire() {
	if q := a.question.Load(); q != nil {
		q.proceed(time.Now(), nil, outcome{})
	}
}

// wait sets the timer. Whether servers still live is seen every maxLate.
func (q *question) wait(now time.Time) {
	at := earlier(q.deadline, now.Add(maxLate))
	if now.Before(q.lateAt) {
		at = earlier(at, q.lateAt)
	}
	if !q.cutUntil.IsZero() {
		at = earlier(at, q.cutUntil)
	}
	if q.alarm == nil {
		q.alarm, _ = q.servers[0].client.alarms.Get().(*alarm)
		if q.alarm == nil {
			q.alarm = new(alarm)
			q.alarm.timer = time.AfterFunc(time.Hour, q.alarm.fire)
		}
		q.alarm.question.Store(q)
	}
	q.alarm.timer.Reset(at.Sub(now))
}

// due returns the server that the query is sent to now, or -1. repeated is true if another server is late.
func (q *question) due(now time.Time) (i int, repeated bool) {
	if i = slices.IndexFunc(q.servers, func(c candidate) bool { return c.again && !c.done }); i >= 0 {
		return i, false
	}
	i = q.next()
	movesOn := q.movesOn
	q.movesOn = false
	if i < 0 || len(q.attempts) == 0 {
		return i, false
	}
	c, last := &q.servers[i], q.attempts[len(q.attempts)-1]
	// If this server and the one asked last are down, all that are left are, and they are asked at once (rule 7).
	allDown := !q.once && c.standing.state == Down && q.servers[last.at].standing.state == Down
	switch {
	case c.sends == 0 && (movesOn || allDown):
		return i, false
	case now.Before(q.lateAt), q.once:
		return -1, false
	}
	last.server.probeForLoop(now)
	return i, true
}

// next returns the index of the server to ask next: the best (rule 3) of the servers that were asked the fewest times.
// It returns -1 if none may be asked.
func (q *question) next() int {
	left, best := q.left(), -1
	for i := range left {
		if c := &left[i]; !c.done && !c.full && (best < 0 || c.precedes(&left[best], q.options.Fastest)) {
			best = i
		}
	}
	if best < 0 || !q.options.Fastest {
		return best
	}
	// Servers about as fast as the fastest are asked in the order of configuration.
	fastest := left[best]
	fastest.standing.rtt = fastest.standing.rtt*3/2 + 5*time.Millisecond
	for i := range left[:best] {
		if c := &left[i]; !c.done && !c.full && c.precedes(&fastest, true) {
			return i
		}
	}
	return best
}

// left returns the servers that count: while a reply is held (rule 6), only those before the server that sent it.
func (q *question) left() []candidate {
	if q.held != nil {
		return q.servers[:q.held.at]
	}
	return q.servers
}

// precedes reports whether c must be asked before other, whatever their order in the configuration. This is so if c was
// asked fewer times, or if rule 3 puts it first. If byTime is true, SRTT counts for rule 3.
func (c *candidate) precedes(other *candidate, byTime bool) bool {
	switch {
	case c.sends != other.sends:
		return c.sends < other.sends
	case c.standing.state != other.standing.state:
		return c.standing.state < other.standing.state
	}
	return byTime && c.standing.rtt < other.standing.rtt
}

// When a query is sent to a server for the third time, its OPT record is left out, because a middlebox may drop packets
// with OPT records. A client that wants signatures has little use for an answer without them.
const plainFrom = 3

// send sends the query to a server, and waits until the server is late. Each time that the same server is asked again
// because it is late, the wait is twice as long (rule 4).
func (q *question) send(i int, repeated bool, now time.Time) {
	c := &q.servers[i]
	a := &attempt{
		server: c.server, question: q, at: i, sent: now, stream: c.stream, repeated: repeated, slot: q.slot,
		patience: c.standing.lateAfter, opcode: opcode(q.query), text: q.text, failedForOthers: q.failedForOthers(i),
	}
	if c.sends == 0 {
		c.first = now
	}
	c.sends++
	if q.next() == i {
		a.patience = min(c.standing.usual, maxWait)
	}
	if repeated {
		a.patience = min(a.patience<<min(c.sends-1, 8), maxWait)
	}
	q.slot++
	c.again = false
	q.lateAt, q.attempts = now.Add(a.patience), append(q.attempts, a)
	packet := q.query
	if a.plain = q.edns && (c.plain || c.sends >= plainFrom && !wire.WantsDNSSEC(q.query)); a.plain {
		packet = wire.CutOPT(slices.Clone(packet))
	}
	c.sent(now, repeated)
	c.owes.Add(1)
	if err := c.carrier(a.stream).send(a, packet); err != nil {
		q.take(a, a.judge(now, nil, err), now)
	}
}

// failedForOthers reports whether another server, which answers other questions, has failed for this question. If so, the
// question is the likely reason if server i fails, too.
func (q *question) failedForOthers(i int) bool {
	for other := range q.servers {
		if c := &q.servers[other]; other != i && c.failure != nil && !c.refuses() {
			return true
		}
	}
	return false
}

// take notes the outcome of an attempt.
func (q *question) take(a *attempt, o outcome, now time.Time) {
	a.outcome, a.ended = o, now
	c, r := &q.servers[a.at], o.reading
	switch {
	case o.err != nil:
		c.err = cause(o.err)
		q.fail(c)
	case r.err != nil:
		c.err = fmt.Errorf("%w: %w", ErrMalformed, r.err)
		c.stray(true)
		c.setLastError(c.err.Error())
		q.fail(c)
	case r.rejectsEDNS() && !a.plain && q.edns:
		c.again = c.again || !c.plain
		c.plain = true
	case !r.usable():
		c.failure = a
		c.setLastError(wire.RcodeName(r.code))
		q.fail(c)
	case r.truncated && !a.stream && q.retryTCP && c.cut != nil:
		// The whole reply was requested already.
	case r.truncated && !a.stream && q.retryTCP:
		c.cut, c.stream, c.again = a, true, true
		if q.cutUntil.IsZero() {
			q.cutUntil = now.Add(truncatedWait)
		}
	case r.negative && q.outranked(a.at):
		c.done = true
		if q.held == nil || a.at < q.held.at {
			q.held = a
		}
	default:
		q.answer = a
	}
}

// fail moves on from a server that has failed for this question (rule 5).
func (q *question) fail(c *candidate) { c.done, q.movesOn = true, true }

// inOrder reports whether rule 6 applies.
func (q *question) inOrder() bool { return !q.options.Fastest && !q.once }

// outranked reports whether a server before server i may still send an answer: it lives and has not replied yet, or it
// has sent a truncated reply.
func (q *question) outranked(i int) bool {
	return q.inOrder() && slices.ContainsFunc(q.servers[:i], func(c candidate) bool {
		return c.cut != nil || !c.done && c.standing.state == Up
	})
}

// settled reports whether no server is left that may answer. Either all servers have failed, or some have sent a
// failure, and the others are down and late (rule 5).
func (q *question) settled(now time.Time) bool {
	failed := q.bestFailure() != nil
	return !slices.ContainsFunc(q.left(), func(c candidate) bool {
		late := c.sends > 0 && !now.Before(c.first.Add(c.standing.lateAfter))
		return !c.done && (!failed || c.standing.state < Down || !late)
	})
}

// bestFailure returns the attempt with the best failure, nil if there is none.
func (q *question) bestFailure() (best *attempt) {
	for i := range q.servers {
		if f := q.servers[i].failure; f != nil && (best == nil || betterFailure(f.reading.code, best.reading.code)) {
			best = f
		}
	}
	return best
}

// giveUp returns the best result so far: a truncated or held reply, or the best failure. If there is none of these, it
// returns an error; reason is why servers without a result are no longer awaited.
func (q *question) giveUp(reason error) (Answer, error) {
	cut := slices.IndexFunc(q.servers, func(c candidate) bool { return c.cut != nil })
	switch failure := q.bestFailure(); {
	case cut >= 0:
		return q.win(q.servers[cut].cut), nil
	case q.held != nil:
		return q.win(q.held), nil
	case failure != nil:
		return q.win(failure), nil
	}
	return Answer{}, q.noReply(reason)
}

// win returns the answer that an attempt has brought. It is provisional if an earlier server may have another one: if it
// has not disclaimed the question. A server for internal names disclaims questions for all other names.
func (q *question) win(a *attempt) Answer {
	q.answer = a
	answer := Answer{Reply: a.reply, Server: a.server.name, Plain: a.plain}
	copy(q.query, q.id[:])
	if q.verbatim {
		copy(a.reply, q.id[:])
	} else {
		answer.Reply = restore(a.reply, q.query, q.text)
	}
	answer.Provisional = a.reading.usable() && q.inOrder() && slices.ContainsFunc(q.servers[:a.at], func(c candidate) bool {
		return c.failure == nil || c.failure.reading.code != dns.RcodeRefused && c.failure.reading.code != dns.RcodeNotImplemented
	})
	return answer
}

// strays is appended to the cause of a server that has sent packets, but no reply to a query in flight.
const strays = ", only packets that are no reply to a query in flight"

// noReply returns the error of a question without a reply, with the cause for each server.
func (q *question) noReply(reason error) *noReply {
	var texts []string
	err := &noReply{text: "no nameserver answered"}
	for i := range q.servers {
		c := &q.servers[i]
		why := c.err
		if why == nil {
			why = reason
		}
		if why == nil {
			continue
		}
		text := c.name + ": " + why.Error()
		if c.sends > 0 && errors.Is(why, ErrTimeout) && c.strayedSince(c.first) {
			text += strays
		}
		texts, err.causes = append(texts, text), append(err.causes, why)
	}
	if len(texts) > 0 {
		err.text += ": " + strings.Join(texts, "; ")
	}
	return err
}

// An Attempt is a query that was sent to one server, and its result; or a server that was not asked.
type Attempt struct {
	Server string `json:"server"`
	// Protocol is udp, tcp or tls. It is empty for a server that was not asked.
	Protocol string `json:"protocol,omitempty"`
	// Sent is the time from the first attempt to this one, in seconds. Took is the time from this attempt to its
	// result. If there is no result yet, Took is the time that has passed since this attempt.
	Sent float64 `json:"sentSeconds"`
	Took float64 `json:"tookSeconds,omitempty"`
	// Result is a response code, the error, or why the server was not asked. It is empty if the attempt had no result
	// yet when the query was answered.
	Result string `json:"result,omitempty"`
	// Usual is the average time that replies of the server take, 0 if that is unknown. Patience is how long the query
	// waits for this result before it asks the next server.
	Usual    float64 `json:"usualSeconds,omitempty"`
	Patience float64 `json:"patienceSeconds,omitempty"`
	// Repeated is true if the query was sent because another server was late.
	Repeated bool `json:"repeated,omitempty"`
	Plain    bool `json:"plain,omitempty"` // without an OPT record
	Used     bool `json:"used,omitempty"`  // the reply to this attempt is the answer
}

// describe is Call.Attempts with mu held.
func (q *question) describe() []Attempt {
	now := q.ended
	if now.IsZero() {
		now = time.Now()
	}
	all := make([]Attempt, 0, len(q.attempts)+len(q.servers))
	for _, a := range q.attempts {
		made := Attempt{
			Server: a.server.name, Protocol: a.server.protocol(a.stream), Plain: a.plain, Repeated: a.repeated, Used: a == q.answer,
			Sent: seconds(a.sent.Sub(q.attempts[0].sent)), Usual: seconds(a.server.rtt()), Patience: seconds(a.patience),
		}
		if made.Took = seconds(now.Sub(a.sent)); !a.ended.IsZero() {
			made.Took, made.Result = seconds(a.ended.Sub(a.sent)), a.String()
		}
		all = append(all, made)
	}
	for i := range q.servers {
		if c := &q.servers[i]; c.sends == 0 {
			reason := c.standing.state.String()
			if c.err != nil {
				reason = c.err.Error()
			}
			all = append(all, Attempt{Server: c.name, Result: reason})
		}
	}
	return all
}

// Others returns a short text about the servers that were asked, and whose replies were not used: the result of each. The
// text is empty if there are no such servers.
func Others(attempts []Attempt) string {
	var texts []string
	for i := range attempts {
		server := attempts[i].Server
		same := func(a Attempt) bool { return a.Server == server }
		if attempts[i].Protocol == "" || slices.ContainsFunc(attempts[:i], same) {
			continue
		}
		ended, used := "", false
		for j := range attempts[i:] {
			a := &attempts[i+j]
			switch {
			case !same(*a):
				continue
			case a.Result != "":
				ended = a.Result
			case ended == "":
				ended = "no reply for " + time.Duration(a.Took*float64(time.Second)).Round(time.Millisecond).String()
			}
			used = used || a.Used
		}
		if !used {
			texts = append(texts, server+": "+ended)
		}
	}
	return strings.Join(texts, "; ")
}

// seconds returns a duration in seconds, rounded to 10 µs.
func seconds(d time.Duration) float64 { return d.Round(10 * time.Microsecond).Seconds() }

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
