package upstream

import (
	"errors"
	"net"
	"sync/atomic"
	"time"
)

// An attempt is one query to one server, in flight. The goroutine that removes an attempt from socket.pending
// calls its method end, which returns it to the pool.
type attempt struct {
	server *server
	sent   time.Time

	// An exchange sets these fields. For probes, deliver and current are nil. current points to the generation of the
	// exchange, and generation is its value when the query was sent. As long as the two are equal, the exchange waits
	// for the reply.
	deliver    func(generation uint64, o outcome)
	current    *atomic.Uint64
	generation uint64
	try        int // index of the server in the exchange

	slot            uint32        // chooses one of the server's UDP sockets
	stream          bool          // sent over a connection
	sends           int           // how often the exchange has sent the query to this server, including this time
	noOPT           bool          // sent without the OPT record that the query has
	retried         bool          // sent a second time, on a new connection
	probe           probeQuestion // which question it asks, if it is a probe of rule 2; otherwise noProbe
	loopProbe       *loopProbe    // nil if the attempt is no loop probe
	failedForOthers bool          // see exchange.failedForOthers; if true, a failure does not count for refusals
	opcode          byte          // the opcode as it is in the header
	question        []byte        // the question as it was sent, in wire form
	packet          []byte        // the whole query, if sent over a connection
}

// newAttempt returns an attempt from the pool.
func newAttempt(s *server) *attempt {
	a, ok := s.shared.attempts.Get().(*attempt)
	if !ok {
		a = new(attempt)
	}
	*a = attempt{server: s, question: a.question[:0], packet: a.packet[:0]}
	return a
}

// awaited reports whether a query or a loop probe still waits for the reply.
func (a *attempt) awaited() bool {
	return a.loopProbe != nil || a.current != nil && a.current.Load() == a.generation
}

// unawaited is how long an attempt is remembered if no query waits for its reply any more. It is remembered because a
// reply shows that the server lives.
const unawaited = time.Second

// expired reports whether the attempt has become too old: older than any query may become or, if it is not awaited,
// older than unawaited.
func (a *attempt) expired(now time.Time) bool {
	age := now.Sub(a.sent)
	return age > time.Duration(a.server.shared.longest.Load()) || age > unawaited && !a.awaited()
}

// end ends the attempt with a reply or an error. It does not copy the reply.
func (a *attempt) end(reply []byte, err error) {
	if errors.Is(err, net.ErrClosed) && a.server.evicted.Load() {
		err = ErrCrowded
	}
	now := time.Now()
	var r reading
	switch {
	case err == nil && a.loopProbe != nil && !a.server.loopProbeAnswered(a.loopProbe):
	case err == nil:
		r = read(reply, a.server.shared.config.Check)
		a.server.replied(a, now, r)
	default:
		a.server.failed(a, err)
	}
	if a.deliver != nil {
		a.server.owes.Add(-1)
		o := outcome{try: a.try, sends: a.sends, reply: reply, reading: r, err: err, stream: a.stream, noOPT: a.noOPT}
		a.deliver(a.generation, o)
	}
	if cap(a.packet) <= maxPooled {
		a.server.shared.attempts.Put(a)
	}
}
