package upstream

import (
	"errors"
	"net"
	"time"
)

// errCase is the error of an attempt whose reply has the question in another case.
var errCase = errors.New("the letters of the reply's question are not in the case of the query")

// maxPooled is the capacity of packet, in bytes, beyond which attempts and exchanges are not
// returned to their pools.
const maxPooled = 4 << 10

// An attempt is one query to one server, in flight. The goroutine that removes it from its
// socket's table calls end, which returns it to the pool.
type attempt struct {
	server *server
	sent   time.Time

	// The exchange that waits for the reply, as long as it is of this generation; nil for
	// probes.
	exchange   *exchange
	generation uint64
	try        int // index of the server in the exchange

	slot      uint32     // chooses one of the server's UDP sockets
	stream    bool       // sent over a connection
	again     bool       // the exchange has sent the query to this server before
	plain     bool       // sent without the OPT record that the query has
	edns      bool       // sent with an OPT record
	retried   bool       // sent a second time, on a new connection
	probe     probe      // which probe of the server's liveness it is, if any
	loopProbe *loopProbe // nil if it is no probe
	verbatim  bool       // the reply's question may be in another case
	opcode    byte       // as it is in the header
	question  []byte     // as sent, in wire form
	packet    []byte     // the whole query, if sent over a connection
}

// keep returns an exchange to its pool.
func (c *Client) keep(e *exchange) {
	if cap(e.packet) <= maxPooled {
		c.exchanges.Put(e)
	}
}

// newAttempt returns an attempt from the pool.
func (c *Client) newAttempt(s *server) *attempt {
	a, ok := c.attempts.Get().(*attempt)
	if !ok {
		a = new(attempt)
	}
	*a = attempt{server: s, question: a.question[:0], packet: a.packet[:0]}
	return a
}

// awaited reports whether the reply is still of use.
func (a *attempt) awaited() bool {
	return a.loopProbe != nil || a.exchange != nil && a.exchange.generation.Load() == a.generation
}

// expired reports whether the attempt is older than any query may get.
func (a *attempt) expired(now time.Time) bool {
	return now.Sub(a.sent) > time.Duration(a.server.client.longest.Load())
}

// end ends the attempt with a reply, which it keeps, or with an error.
func (a *attempt) end(reply []byte, err error) {
	if errors.Is(err, net.ErrClosed) && a.server.evicted.Load() {
		err = ErrCrowded
	}
	now := time.Now()
	var r reading
	switch {
	case err == nil && a.loopProbe != nil && !a.server.client.probeAnswered(a.loopProbe):
	case err == nil:
		r = a.server.client.read(reply)
		a.server.replied(a, now, r)
	case errors.Is(err, errCase):
		a.server.replied(a, now, r)
	default:
		a.server.failed(a, err)
	}
	if a.exchange != nil {
		a.exchange.deliver(a.generation, outcome{
			try: a.try, reply: reply, reading: r, err: err, stream: a.stream, plain: a.plain,
		})
	}
	if cap(a.packet) <= maxPooled {
		a.server.client.attempts.Put(a)
	}
}
