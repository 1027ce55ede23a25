package upstream

import (
	"errors"
	"net"
	"time"
)

// errCase ends an attempt whose reply has the question in another case.
var errCase = errors.New("the reply's question is in another case")

// maxPooled is the length of packet, in bytes, beyond which attempts and exchanges are not
// kept in pools.
const maxPooled = 4 << 10

// An attempt is one query on its way to one server. Whoever takes it out of its
// socket's table ends it, after which it belongs to the pool.
type attempt struct {
	server *server
	sent   time.Time

	// Who waits for it, as long as the exchange's generation is this one; nil if
	// nobody does.
	exchange   *exchange
	generation uint64
	try        int // index of the server in the exchange

	slot     uint32 // which of the server's sockets
	stream   bool   // asked over a connection
	again    bool   // the server was asked the same before
	plain    bool   // asked without EDNS
	edns     bool   // asked with an OPT record
	retried  bool   // on a new connection
	probe    *loopProbe
	life     life
	verbatim bool   // the reply's question may be in another case
	opcode   byte   // as it is in the header
	question []byte // as sent, in wire form
	packet   []byte // the whole query, of attempts over a connection only
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

// awaited reports whether somebody waits for the reply.
func (a *attempt) awaited() bool {
	return a.probe != nil || a.exchange != nil && a.exchange.generation.Load() == a.generation
}

// expired reports whether nobody can wait for the reply any more.
func (a *attempt) expired(now time.Time) bool {
	return now.Sub(a.sent) > a.server.client.config.Timeout
}

// end ends the attempt with a reply, which it keeps, or an error.
func (a *attempt) end(reply []byte, err error) {
	if errors.Is(err, net.ErrClosed) && a.server.evicted.Load() {
		err = ErrCrowded
	}
	now := time.Now()
	var r reading
	switch {
	case err == nil:
		r = a.server.client.read(reply)
		a.server.replied(a, now, r)
	case errors.Is(err, errCase):
		a.server.replied(a, now, r)
	default:
		a.server.failed(a, err)
	}
	if a.probe != nil && err == nil {
		a.server.client.probeAnswered(a.probe)
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
