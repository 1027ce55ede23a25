package upstream_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
)

// V7: after a suspend, no query leaves from a socket or over a connection of before: the address
// of this host, or what a NAT and the nameserver know of it, may have changed.
func TestSuspendedSockets(t *testing.T) { // F11, F15
	t.Parallel()
	clock := fakeclock.New()
	s := serve(t, func(query []byte, _ string) [][]byte { return [][]byte{reply(query, 3)} })
	g := client(t, upstream.Config{Clock: clock.Clock}).Group(specs(s), upstream.Options{})
	for _, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
		ask(t, g, how)
		before := s.takeSources()
		clock.Suspend(t, time.Minute)
		const queries = 20 // they leave from four sockets at random
		for range queries {
			ask(t, g, how)
		}
		for _, source := range s.takeSources() {
			if slices.Contains(before, source) {
				t.Errorf("a query over %v left from %s after the suspend, too", how, source)
			}
		}
	}
}

// takeSources returns the addresses that queries came from since the last call.
func (r *raw) takeSources() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	sources := slices.Collect(maps.Keys(r.from))
	clear(r.from)
	return sources
}
