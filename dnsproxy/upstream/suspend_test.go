package upstream_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// V7: after a suspend, no query leaves from a socket or over a connection of before: the address
// of this host, or what a NAT and the nameserver know of it, may have changed.
func TestSuspendedSockets(t *testing.T) { // F11, F15
	t.Parallel()
	clock := fakeclock.New()
	s := serve(t, answers(3))
	c := client(t, upstream.Config{Clock: clock.Clock})
	g := c.Group(specs(s), upstream.Options{})
	for i, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
		asked := func(after byte) []byte { // other names before and after the suspend
			q := query()
			q[13], q[14] = 'a'+byte(i), after
			return q
		}
		for _, when := range []byte("ba") {
			const queries = 20 // they leave from four sockets at random
			for range queries {
				if _, _, err := g.Exchange(t.Context(), asked(when), how); err != nil {
					t.Fatal(err)
				}
			}
			clock.Suspend(t, time.Minute)
			if when == 'a' {
				wait.Until(t, "sockets that are not used are closed", func() bool { return c.Open() == 0 })
			}
		}
		before := s.sourcesOf(asked('b')[12:questionEnd])
		for source := range s.sourcesOf(asked('a')[12:questionEnd]) {
			if before[source] {
				t.Errorf("a query over %v left from %s after the suspend, too", how, source)
			}
		}
	}
}

// sourcesOf returns the addresses that queries with a question came from.
func (r *raw) sourcesOf(question []byte) map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	sources := map[string]bool{}
	for i, packet := range r.got {
		if bytes.Contains(packet, question) {
			sources[r.from[i]] = true
		}
	}
	return sources
}
