package upstream

import (
	"context"
	"time"
)

// Exchange is Start for a test that waits. After the end of ctx it returns the error of ctx.
func (g *Group) Exchange(ctx context.Context, query []byte, how Mode) (reply []byte, server string, err error) {
	answer, err := g.Ask(ctx, query, how)
	return answer.Reply, answer.Server, err
}

// Ask is Exchange with the whole answer.
func (g *Group) Ask(ctx context.Context, query []byte, how Mode) (Answer, error) {
	result := make(waiter, 1)
	started := g.Start(query, how, result)
	select {
	case r := <-result:
		return r.answer, r.err
	case <-ctx.Done():
		started.Cancel()
		return Answer{}, ctx.Err()
	}
}

// Suspect sends each server a loop probe if one is due.
func (g *Group) Suspect() {
	for _, s := range g.servers {
		s.probeForLoop(time.Now())
	}
}

// A waiter is the receiver of Ask.
type waiter chan received

type received struct {
	answer Answer
	err    error
}

// Receive passes the result on, if it is the first.
func (w waiter) Receive(answer Answer, err error) {
	select {
	case w <- received{answer, err}:
	default:
	}
}

// Open returns how many sockets are open.
func (c *Client) Open() int64 { return c.open.Load() }

// OpenElsewhere returns how many sockets to servers that are not configured are open.
func (c *Client) OpenElsewhere() int64 { return c.elsewhereOpen.Load() }
