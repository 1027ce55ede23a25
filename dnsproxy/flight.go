package dnsproxy

import (
	"net/netip"
	"strings"
	"sync"

	"github.com/nametap/nametap/dnsproxy/cache"
)

// A flightKey is a question on its way to nameservers.
type flightKey struct {
	cache.Key // of a message that is relayed: all but its ID as the name, no more
	// over is what the client asked over, where nameservers are asked over the same.
	over transport
	// server is the one that is asked, where that is not ours to choose.
	server netip.AddrPort
}

// A flight is a question that nameservers are being asked, for all who ask it
// meanwhile.
type flight struct {
	key  flightKey
	done chan struct{} // closed when result is there
	// result may be read once done is closed.
	result resolution
}

// flights are the questions on their way. The zero value is ready for use.
type flights struct {
	mu    sync.Mutex
	byKey map[flightKey]*flight
}

// join returns the flight for a question. first says that there was none: the
// caller is to ask and to land it.
func (f *flights) join(key flightKey) (joined *flight, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if joined, ok := f.byKey[key]; ok {
		return joined, false
	}
	if f.byKey == nil {
		f.byKey = map[flightKey]*flight{}
	}
	key.Name = strings.Clone(key.Name) // it lives in the client's query
	joined = &flight{key: key, done: make(chan struct{})}
	f.byKey[key] = joined
	return joined, true
}

// land gives the result to all who joined.
func (f *flights) land(landed *flight, result resolution) {
	f.mu.Lock()
	delete(f.byKey, landed.key)
	f.mu.Unlock()
	landed.result = result
	close(landed.done)
}
