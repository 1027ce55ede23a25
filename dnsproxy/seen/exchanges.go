package seen

import (
	"bytes"
	"context"
	"net/netip"
	"sync/atomic"

	"github.com/nametap/nametap/internal/clock"
)

// maxExchangeBytes bounds the length of all messages together that wait for a reader.
const maxExchangeBytes = 1 << 20

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
// the queue of a reader. If the queue is full, further queries are dropped.
type Exchanges struct {
	reader *Reader
	bytes  atomic.Int64       // the length of all messages in the queue
	onDrop func(messages int) // called when messages are dropped
}

// put adds a query to the queue if there is room, with a copy of its messages. kept is the copy of q. put does not block.
func (e *Exchanges) put(kept, q *Query) {
	size := int64(len(q.Request) + len(q.Response))
	if queue := e.reader.queue; e.bytes.Add(size) <= maxExchangeBytes && len(queue) < cap(queue) {
		whole, local := *kept, q.Local()
		whole.Local = func() netip.AddrPort { return local }
		whole.Request, whole.Response = bytes.Clone(q.Request), bytes.Clone(q.Response)
		select {
		case queue <- &whole:
			return
		default: // another query has taken the last place
		}
	}
	e.bytes.Add(-size)
	e.onDrop(messages(q.Response))
}

// Close removes the reader and drops the queries that it has not read.
func (e *Exchanges) Close() {
	e.reader.Close()
	for range len(e.reader.queue) {
		e.onDrop(messages((<-e.reader.queue).Response))
	}
}

// Next waits for a query and returns it. Before it returns, it waits up to gatherTime for more queries, so that the
// caller can get these with Poll. After the end of ctx, Next returns the error of ctx, or a query that is still in
// the queue.
func (e *Exchanges) Next(ctx context.Context) (*Exchange, error) {
	select {
	case q := <-e.reader.queue:
		clock.Sleep(ctx, gatherTime)
		return e.take(q), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Poll returns a query if there is one in the queue, otherwise nil.
func (e *Exchanges) Poll() *Exchange {
	select {
	case q := <-e.reader.queue:
		return e.take(q)
	default:
		return nil
	}
}

// take returns the Exchange for a query from the queue.
func (e *Exchanges) take(q *Query) *Exchange {
	e.bytes.Add(-int64(len(q.Request) + len(q.Response)))
	path := e.reader.recorder.units.path(q)
	return &Exchange{Record: record(q, path), Local: q.Local(), Request: q.Request, Response: q.Response}
}
