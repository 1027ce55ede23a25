package agent

import (
	"context"
	"runtime"
	"runtime/debug"
	"time"
)

// freeAfter is the pause in pushes after which memory is freed. Pushes that follow each
// other more closely would need it again.
const freeAfter = 2 * time.Second

// A memory returns the memory that a push has used to the kernel. A push needs several times
// the size of the table, and Go keeps the memory until its next garbage collection, which may
// be far off in an agent that answers without allocating. `make bench ARGS=-memory` measures
// it.
type memory struct {
	pushed chan struct{}
}

func newMemory() *memory { return &memory{pushed: make(chan struct{}, 1)} }

// note notes that a push was loaded. It does not block.
func (m *memory) note() {
	select {
	case m.pushed <- struct{}{}:
	default:
	}
}

// run calls free after each pause in pushes until ctx ends.
func (m *memory) run(ctx context.Context, free func()) {
	timer := time.NewTimer(freeAfter) // also after the start
	defer timer.Stop()
	for {
		select {
		case <-m.pushed:
			timer.Reset(freeAfter)
		case <-timer.C:
			free()
		case <-ctx.Done():
			return
		}
	}
}

// freeMemory collects garbage and returns free memory to the kernel. Queries are answered
// meanwhile; it takes a few milliseconds. The contents of a sync.Pool survive one collection.
func freeMemory() {
	runtime.GC()
	debug.FreeOSMemory() // collects, too
}
