package agent

import (
	"runtime"
	"testing"
)

// Memory is freed after much was allocated, and not again after little.
func TestMemoryIsFreed(t *testing.T) { // C8
	collections := func() uint32 {
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.NumForcedGC
	}
	runtime.GC() // until then, the process does not count all that it has allocated
	m := &memory{freed: allocated()}
	before := collections()
	m.free()
	if got := collections(); got != before {
		t.Errorf("%d collections without garbage", got-before)
	}
	message := make([]byte, freeLeast)
	for i := range message {
		message[i] = byte(i)
	}
	runtime.KeepAlive(message)
	m.free()
	if got := collections(); got == before {
		t.Errorf("no collection after %d bytes", freeLeast)
	}
}
