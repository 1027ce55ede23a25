package push

import (
	"sync"
	"time"
)

// A record has the times of the last push, the last ACK and the last NACK of a session. Times are counted from the
// start of the service; 0 means never. A record is guarded by session.mu.
type record struct {
	pushed, acked time.Duration
	nack          nack // the last one
}

// rejected reports whether the last answer was a NACK.
func (r *record) rejected() bool { return r.nack.time > r.acked }

// answered notes an answer to the last push.
func (r *record) answered(now time.Duration, rejected bool, reason string) {
	if rejected {
		r.nack = nack{now, cut(reason)}
		return
	}
	r.acked = now
}

// A nack says when a push was rejected, and why.
type nack struct {
	time   time.Duration
	reason string
}

// maxNacks bounds how many NACKs of clients without a stream are kept.
const maxNacks = 1 << 10

// nacks keeps the NACKs of clients whose stream has ended, if the last answer on the stream was a NACK. An agent that
// gets a resource with a wrong hash rejects the push and connects again. Its new stream takes the NACK from here.
type nacks struct {
	mu   sync.Mutex
	last map[string]nack // by node id
}

func newNacks() *nacks { return &nacks{last: map[string]nack{}} }

// keep keeps the NACK of a client whose stream has ended. If there are too many, it drops an arbitrary one.
func (n *nacks) keep(id string, last nack) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for other := range n.last {
		if len(n.last) < maxNacks {
			break
		}
		delete(n.last, other)
	}
	n.last[id] = last
}

// take removes the NACK of a client, and returns it.
func (n *nacks) take(id string) nack {
	n.mu.Lock()
	defer n.mu.Unlock()
	last := n.last[id]
	delete(n.last, id)
	return last
}
