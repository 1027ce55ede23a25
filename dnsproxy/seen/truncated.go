package seen

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// maxTruncated bounds the truncated responses whose clients are awaited; others are not recorded.
	maxTruncated = 256
	// retryWait is how long a client may take to ask again over TCP.
	retryWait = 5 * time.Second
)

// A retry is the question that a client should ask again over TCP.
type retry struct {
	client netip.Addr
	name   wire.Name
	qtype  uint16
}

// retries has a timer for each truncated response over UDP whose client has not asked again yet.
type retries struct {
	count  atomic.Int32 // how many there are
	mu     sync.Mutex
	timers map[retry]*time.Timer
}

// await calls late after retryWait, unless the client of a query asks again.
func (r *retries) await(q *Query, late func()) {
	key := retry{q.Client.Addr(), q.Name, q.Type}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timers[key] != nil || len(r.timers) >= maxTruncated {
		return
	}
	if r.timers == nil {
		r.timers = map[retry]*time.Timer{}
	}
	r.count.Add(1)
	r.timers[key] = time.AfterFunc(retryWait, func() {
		if r.end(key) {
			late()
		}
	})
}

// end stops waiting for a question, and reports whether it was awaited.
func (r *retries) end(key retry) bool {
	if r.count.Load() == 0 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	timer := r.timers[key]
	if timer == nil {
		return false
	}
	timer.Stop()
	delete(r.timers, key)
	r.count.Add(-1)
	return true
}
