package upstream

import (
	"errors"
	"net"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// An attempt is one query to one server. The goroutine that removes it from socket.pending calls its method end.
type attempt struct {
	server   *server
	question *question // nil for probes
	at       int       // index of the server in the question
	sent     time.Time

	slot            uint32        // chooses one of the server's UDP sockets
	stream          bool          // sent over a connection
	plain           bool          // sent without the OPT record that the query has
	repeated        bool          // sent because a server was late
	patience        time.Duration // how long the question waits for the outcome before it asks the next server
	failedForOthers bool          // see question.failedForOthers; if true, a failure does not count for refusals

	loopProbe *loopProbe // nil if the attempt is no loop probe

	opcode byte   // the opcode as it is in the header
	text   []byte // the question in wire form
	packet []byte // the whole query, if sent over a connection

	// Guarded by the question's mutex.
	outcome
	ended time.Time // zero until there is an outcome
}

// An outcome is what has become of an attempt.
type outcome struct {
	reply   []byte
	reading reading // of reply
	err     error   // why there is no reply
}

// String describes the outcome.
func (o *outcome) String() string {
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

// awaited reports whether a question still waits for the reply.
func (a *attempt) awaited() bool { return a.question != nil && !a.question.over.Load() }

// unawaited is how long an attempt is remembered if no question waits for its reply any more. It is remembered because a
// reply shows that the server lives.
const unawaited = time.Second

// expired reports whether the attempt has become too old.
func (a *attempt) expired(now time.Time) bool {
	limit := unawaited
	if a.loopProbe != nil {
		limit = defaultTimeout
	}
	return !a.awaited() && now.Sub(a.sent) > limit
}

// end ends the attempt with a reply or an error. It does not copy the reply.
func (a *attempt) end(reply []byte, err error) {
	now := time.Now()
	o := a.judge(now, reply, err)
	if a.question != nil {
		a.question.proceed(now, a, o)
	}
}

// judge reads the reply to the attempt, and notes in the server's history that it has come, or that there is none.
func (a *attempt) judge(now time.Time, reply []byte, err error) outcome {
	if errors.Is(err, net.ErrClosed) && a.server.evicted.Load() {
		err = ErrCrowded
	}
	if a.question != nil {
		a.server.owes.Add(-1)
	}
	o := outcome{reply: reply, err: err}
	switch {
	case err == nil && a.loopProbe != nil && !a.server.loopProbeAnswered(a.loopProbe):
	case err == nil:
		o.reading = read(reply, a.server.client.config.Check)
		a.server.replied(a, now, o.reading)
	default:
		a.server.failed(a, err)
	}
	return o
}
