package webhook

import (
	"context"
	"slices"
	"sync"
	"time"
)

// patience is how long a request that holds bytes may wait for its client while other requests wait for bytes. In that
// time an API server sends 3 MiB over 100 Mbit/s.
const patience = 250 * time.Millisecond

// A budget bounds the bytes that requests hold at a time. While requests wait for bytes, it ends requests that have
// held bytes for longer than patience because their clients are slow.
type budget struct {
	mu      sync.Mutex
	free    int64
	holders map[*part]struct{} // the parts that hold bytes
	waiting []*part            // in the order of their requests
}

// A part of a budget is what one request holds.
type part struct {
	bytes   int64
	start   time.Time     // when the bytes were granted
	giveUp  func()        // ends the wait for the client; nil if the request does not wait for its client
	granted chan struct{} // closed when the bytes are granted
}

func newBudget(bytes int64) *budget { return &budget{free: bytes, holders: map[*part]struct{}{}} }

// take returns a part, which the caller must release; nil if ctx ends before enough bytes are free. If enough bytes are
// free at once, take returns a part even if ctx has ended. giveUp ends the request's wait for its client. It must not
// block. It is called at most once, and not after settle or release.
func (b *budget) take(ctx context.Context, bytes int64, giveUp func()) *part {
	p := &part{bytes: bytes, giveUp: giveUp, granted: make(chan struct{})}
	b.mu.Lock()
	b.waiting = append(b.waiting, p)
	b.grantLocked()
	b.mu.Unlock()
	select {
	case <-p.granted:
		return p
	default:
	}
	ticker := time.NewTicker(patience / 5)
	defer ticker.Stop()
	for {
		select {
		case <-p.granted:
			return p
		case <-ctx.Done():
			b.release(p)
			return nil
		case <-ticker.C:
			b.endSlow()
		}
	}
}

// settle is called when the request does not wait for its client any more.
func (b *budget) settle(p *part) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p.giveUp = nil
}

// release gives the bytes of a part back. If the part still waits for bytes, release ends the wait.
func (b *budget) release(p *part) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p.giveUp = nil
	if _, ok := b.holders[p]; ok {
		delete(b.holders, p)
		b.free += p.bytes
	}
	b.waiting = slices.DeleteFunc(b.waiting, func(other *part) bool { return other == p })
	b.grantLocked()
}

// grantLocked grants the free bytes to the waiting parts, in their order.
func (b *budget) grantLocked() {
	for len(b.waiting) > 0 && b.waiting[0].bytes <= b.free {
		p := b.waiting[0]
		b.waiting, b.free, p.start = b.waiting[1:], b.free-p.bytes, time.Now()
		b.holders[p] = struct{}{}
		close(p.granted)
	}
}

// endSlow ends the requests whose clients are slow.
func (b *budget) endSlow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.holders {
		if p.giveUp != nil && time.Since(p.start) > patience {
			p.giveUp()
			p.giveUp = nil
		}
	}
}
