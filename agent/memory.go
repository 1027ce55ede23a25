package agent

import (
	"context"
	"runtime"
	"runtime/debug"
	"time"
)

// freeAfter is the pause in pushes after which memory is freed. If pushes follow each
// other faster, the next push needs the memory again.
const freeAfter = 2 * time.Second

// A memory returns to the kernel the memory that a push has used. A push needs several times
// the size of the table, and Go keeps that memory until its next garbage collection, which may
// be far off in an agent that answers without allocating. `make bench ARGS=-memory` measures
// the memory.
type memory struct {
	pushed chan struct{}
}

func newMemory() *memory { return &memory{pushed: make(chan struct{}, 1)} }

// note tells run that a push was loaded. It does not block.
func (m *memory) note() {
	select {
	case m.pushed <- struct{}{}:
	default:
	}
}

// run calls free after each pause in pushes until ctx ends.
func (m *memory) run(ctx context.Context, free func()) {
	timer := time.NewTimer(freeAfter) // the start counts as a push
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

// freeMemory collects garbage and returns free memory to the kernel. It takes a few milliseconds, during which queries
// are answered. It collects twice, because the contents of a sync.Pool survive one collection.
func freeMemory() {
	runtime.GC()
	debug.FreeOSMemory() // collects garbage again
}
