package upstream_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// F6, F10: 10,000 queries in flight to a server that is dead cost few goroutines
// and little memory, and when nobody asks there are none.
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
			if _, _, err := g.Exchange(context.Background(), query(), upstream.UDPOnly); !errors.Is(err, upstream.ErrTimeout) {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Second) // all are in flight
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
	wait(t, "the sockets are closed", func() bool { return runtime.NumGoroutine() <= before })
}
