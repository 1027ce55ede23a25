package push

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/chans"
)

// A broadcaster pushes to the sessions for which something has changed. It works in rounds, and after each round pauses
// for as long as the round took. Half of the processors' time is left to clients' answers, new clients and further
// changes. The next round sends all changes that came meanwhile, in one push for each client.
type broadcaster struct {
	mu       sync.Mutex
	queue    []*session
	nonEmpty chan struct{} // has an element if the queue is not empty
}

// add puts sessions into the next round.
func (b *broadcaster) add(sessions []*session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queue = slices.Grow(b.queue, len(sessions))
	for _, s := range sessions {
		if !s.queued.Swap(true) {
			b.queue = append(b.queue, s)
		}
	}
	if len(b.queue) > 0 {
		chans.Wake(b.nonEmpty)
	}
}

// run does rounds until ctx ends.
func (b *broadcaster) run(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-b.nonEmpty:
		}
		began := time.Now()
		b.round()
		pause.Reset(time.Since(began))
	}
}

// round pushes to all sessions in the queue.
func (b *broadcaster) round() {
	b.mu.Lock()
	queue := b.queue
	b.queue = nil
	b.mu.Unlock()
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(queue)) {
		workers.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(queue)); i = next.Add(1) - 1 {
				queue[i].queued.Store(false) // from here on, a change puts the session into the next round
				_ = queue[i].push()          // the handler of the stream notices an error, too
			}
		})
	}
	workers.Wait()
}
