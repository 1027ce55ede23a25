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

// A memory returns what a push has used to the kernel. A push needs several times the size
// of the table, and Go keeps the memory for its next garbage collection, which an agent that
// answers without allocating may not need for a long time: after ten pushes of 10,000 hosts
// 17 MiB instead of 8 MiB, and 100 MiB instead of 30 MiB with 100,000 hosts.
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
	timer := time.NewTimer(freeAfter) // what the start has used
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
