package upstream_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// F6, F10: 10,000 queries at once to a server that is dead cost few goroutines and
// little memory, and when nobody asks there are none. How many of them come before
// it has been silent for long (rule 9) is up to the machine.
func TestResources(t *testing.T) {
	if testing.Short() {
		t.Skip("takes as long as a socket lives")
	}
	s := serve(t, silence)
	c := client(t, upstream.Config{Timeout: 2 * time.Second})
	g := c.Group(specs(s), upstream.Options{})
	before := runtime.NumGoroutine()
	const queries = 10_000
	var asking sync.WaitGroup
	for range queries {
		asking.Go(func() {
			if _, _, err := g.Exchange(context.Background(), query(), upstream.UDPOnly); !errors.Is(err, upstream.ErrTimeout) && !errors.Is(err, upstream.ErrOverload) {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Second) // all are in flight, or were turned away
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	if n := runtime.NumGoroutine() - before - queries; n > 50 {
		t.Errorf("%d goroutines", n)
	}
	t.Logf("%d MiB", (memory.HeapInuse+memory.StackInuse)>>20)
	if memory.HeapInuse+memory.StackInuse > 128<<20 {
		t.Errorf("%d MiB in use", (memory.HeapInuse+memory.StackInuse)>>20)
	}
	asking.Wait()
	wait.Until(t, "the sockets are closed", func() bool { return runtime.NumGoroutine() <= before })
}

// Close ends what is in flight; later queries fail.
func TestClose(t *testing.T) {
	t.Parallel()
	s := serve(t, silence)
	c := upstream.NewClient(upstream.Config{Timeout: time.Minute})
	g := c.Group(specs(s), upstream.Options{})
	var asking sync.WaitGroup
	for _, how := range []upstream.How{upstream.UDPOnly, upstream.TCPOnly} {
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
