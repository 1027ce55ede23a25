package upstream

import "context"

// Ask is like Exchange, and returns the whole answer.
func (g *Group) Ask(ctx context.Context, query []byte, how How) (Answer, error) {
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
