package dnsproxy

import (
	"sync/atomic"

	"github.com/nametap/nametap/internal/listen"
)

// A front passes each query of the listeners to the handler that is in use when the query arrives.
type front struct {
	*common
	inUse atomic.Pointer[handler]
}

// newPacer returns the Pacer by which a listener waits before it retries after a transient error.
func newPacer(h *front, listener Addr) *listen.Pacer {
	return &listen.Pacer{Log: h.log, Listener: listener.String(), Count: h.metrics.listenerErrors.Inc}
}
