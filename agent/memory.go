package agent

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

const (
	// freeAfter is the time from the start, or from the last call of postpone, until memory is freed. A push that comes
	// sooner needs the memory again.
	freeAfter = 2 * time.Second
	// freeLeast is how many bytes must have been allocated since memory was last freed. A small change leaves less
	// garbage, and freeing that would cost more than it brings.
	freeLeast = 1 << 20
)

// memory returns free memory to the kernel when pushes pause. A push needs several times the size of its message, and
// Go keeps that memory until its next garbage collection, which may be far off in an agent that answers without
// allocating.
type memory struct {
	timer *time.Timer

	mu    sync.Mutex
	freed uint64 // guarded by mu: bytes that the process had allocated when memory was last freed
}

// newMemory returns a memory. It calls free once, after freeAfter, because the start of the agent, like a push, leaves
// much garbage.
func newMemory() *memory {
	m := &memory{}
	m.timer = time.AfterFunc(freeAfter, m.free)
	return m
}

// postpone puts off the next call of free. It is called after each push, accepted or rejected, when a connection to
// the control plane ends, because a part of a push may have arrived before the end, and after the guard's records were saved.
func (m *memory) postpone() { m.timer.Reset(freeAfter) }

// free collects garbage and returns free memory to the kernel, unless less than freeLeast bytes were allocated. It takes
// a few milliseconds; queries are still answered meanwhile. It collects twice, because the contents of a sync.Pool
// survive one collection.
func (m *memory) free() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if allocated()-m.freed < freeLeast {
		return
	}
	runtime.GC()
	debug.FreeOSMemory() // collects garbage again
	m.freed = allocated()
}

// allocated returns how many bytes of the heap the process has allocated since its start.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
