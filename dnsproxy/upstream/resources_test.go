package upstream_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// F6, F10: 10,000 queries at once to a dead server need few goroutines and
// little memory, and without queries there are no goroutines. How many of the queries begin
// before the server has been silent for long (rule 9) depends on the machine.
func TestResources(t *testing.T) {
	s := serve(t, silence)
	c := client(t, upstream.Config{Timeout: 2 * time.Second})
	g := c.Group(specs(s), upstream.Options{})
	before := runtime.NumGoroutine()
	const queries = 10_000
	var asking sync.WaitGroup
	var ended atomic.Int64
	for range queries {
		asking.Go(func() {
			defer ended.Add(1)
			if _, _, err := g.Exchange(context.Background(), query(), upstream.UDPOnly); !errors.Is(err, upstream.ErrTimeout) && !errors.Is(err, upstream.ErrSilent) {
				t.Error(err)
			}
		})
	}
	var most int
	var memory uint64
	wait.Until(t, "all queries have ended", func() bool {
		waiting := queries - int(ended.Load())
		most = max(most, runtime.NumGoroutine()-before-waiting)
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		memory = max(memory, m.HeapInuse+m.StackInuse)
		return waiting == 0
	})
	t.Logf("%d goroutines, %d MiB", most, memory>>20)
	if most > 50 {
		t.Errorf("%d goroutines beside the askers", most)
	}
	if memory > 128<<20 {
		t.Errorf("%d MiB in use", memory>>20)
	}
	asking.Wait()
	wait.Until(t, "the sockets are closed", func() bool { return runtime.NumGoroutine() <= before })
}

// Close ends queries in flight; later ones fail.
func TestClose(t *testing.T) {
	t.Parallel()
	s := serve(t, silence)
	c := upstream.NewClient(upstream.Config{Timeout: time.Minute})
	g := c.Group(specs(s), upstream.Options{})
	var asking sync.WaitGroup
	for _, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
		asking.Go(func() {
			if _, _, err := g.Exchange(context.Background(), query(), how); !errors.Is(err, net.ErrClosed) {
				t.Errorf("%v: %v", how, err)
			}
		})
	}
	wait.Until(t, "both queries are there", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.conns > 0 && len(s.got) > 1
	})
	c.Close()
	asking.Wait()
	if _, _, err := g.Exchange(context.Background(), query(), 0); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
