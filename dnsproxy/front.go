package dnsproxy

import (
	"sync/atomic"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/sockets"
)

// A front gives each query of the listeners to the handler in use when the query arrives.
type front struct {
	*common
	inUse atomic.Pointer[handler]
}

// fast is [handler.fast].
func (f *front) fast(dst []byte, t *task, s *table.Scratch) ([]byte, verdict) {
	t.handler = f.inUse.Load()
	return t.handler.fast(dst, t, s)
}

// slow is [handler.slow], for a task that fast has left for later.
func (f *front) slow(t *task) []byte { return t.handler.slow(t) }

// refuse is [handler.refuse], for a task that fast has left for later.
func (f *front) refuse(dst []byte, t *task) (response []byte, ok bool) {
	return t.handler.refuse(dst, t)
}

// newPacer returns the pacer of a listener's retries after transient errors.
func newPacer(h *front, listener Addr) *sockets.Pacer {
	return &sockets.Pacer{Log: h.log, Listener: listener.String(), Count: h.metrics.listenerErrors.Inc}
}
