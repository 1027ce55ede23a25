package seen

import (
	"context"
	"net/netip"
	"sync/atomic"

	"github.com/nametap/nametap/internal/chans"
)

const (
	// maxExchanges is how many queries may wait for a reader of messages.
	maxExchanges = 1024
	// maxExchangeBytes bounds the length of all messages of these queries together.
	maxExchangeBytes = 1 << 20
)

// An Exchange is a query with its messages.
type Exchange struct {
	Record

	Local    netip.AddrPort // the address of the agent
	Request  []byte
	Response []byte // empty if there was no response
}

// Messages returns how many messages the exchange has.
func (e *Exchange) Messages() int { return messages(e.Response) }

func messages(response []byte) int {
	if len(response) == 0 {
		return 1
	}
	return 2
}

// Exchanges reads queries with their messages. Only one goroutine may use it. Queries that were not read yet wait in
// a queue. If the queue is full, further queries are dropped.
type Exchanges struct {
	reader   *Reader
	queue    chan *queuedQuery
	bytes    atomic.Int64       // the length of all messages in queue
	halfFull chan struct{}      // has an element when the queue may be half full
	onDrop   func(messages int) // called when messages are dropped
}

// A queuedQuery is a query in the queue of Exchanges.
type queuedQuery struct {
	*Query

	local    netip.AddrPort
	messages []byte // the request, then the response
	request  int    // length of the request
}

func newExchanges(reader *Reader, onDrop func(messages int)) *Exchanges {
	return &Exchanges{reader: reader, queue: make(chan *queuedQuery, maxExchanges), halfFull: make(chan struct{}, 1), onDrop: onDrop}
}

// put adds a query to the queue if there is room, with a copy of its messages. kept is the copy of q. put does not block.
func (e *Exchanges) put(kept, q *Query) {
	size := len(q.Request) + len(q.Response)
	bytes := e.bytes.Add(int64(size))
	if bytes > maxExchangeBytes/2 || len(e.queue) >= maxExchanges/2 {
		chans.Wake(e.halfFull)
	}
	if bytes <= maxExchangeBytes && len(e.queue) < cap(e.queue) {
		w := &queuedQuery{Query: kept, local: q.Local(), messages: make([]byte, 0, size), request: len(q.Request)}
		w.messages = append(append(w.messages, q.Request...), q.Response...)
		select {
		case e.queue <- w:
			return
		default: // another query has taken the last place
		}
	}
	e.bytes.Add(-int64(size))
	e.onDrop(messages(q.Response))
}

// Close removes the reader and drops the queries that it has not read.
func (e *Exchanges) Close() {
	e.reader.Close()
	for {
		select {
		case w := <-e.queue:
			e.onDrop(messages(w.messages[w.request:]))
		default:
			return
		}
	}
}

// Next waits for a query and returns it. Before it returns, it waits up to gatherTime for more queries, so that the
// caller can get these with Poll. After the end of ctx, Next returns the error of ctx, or a query that is still in
// the queue.
func (e *Exchanges) Next(ctx context.Context) (*Exchange, error) {
	select {
	case w := <-e.queue:
		gather(ctx, e.halfFull)
		return e.take(w), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Poll returns a query if there is one in the queue, otherwise nil.
func (e *Exchanges) Poll() *Exchange {
	select {
	case w := <-e.queue:
		return e.take(w)
	default:
		return nil
	}
}

// take returns the Exchange for a query from the queue.
func (e *Exchanges) take(w *queuedQuery) *Exchange {
	e.bytes.Add(-int64(len(w.messages)))
	return &Exchange{
		Record: record(w.Query, e.reader.recorder.units.path(w.Query)), Local: w.local,
		Request: w.messages[:w.request:w.request], Response: w.messages[w.request:],
	}
}
