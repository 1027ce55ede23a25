package agent

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// Memory is freed 2 s after the last push, if much was allocated.
func TestMemoryIsFreed(t *testing.T) { // C8
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		defer m.timer.Stop()
		const rest = 2 * time.Second
		garbage := make([]byte, freeLeast)
		at := func() uint64 { // under the lock: a timer does not order goroutines for the race detector
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.freed
		}
		freed := func(after time.Duration) bool {
			before := at()
			time.Sleep(after) //nolint:forbidigo // the bubble's clock
			synctest.Wait()
			return at() != before
		}
		if freed(rest-1) || !freed(1) {
			t.Error("the memory of the start is not freed after 2 s")
		}
		m.mu.Lock()
		m.freed = allocated()
		m.mu.Unlock()
		m.postpone()
		if freed(2 * rest) {
			t.Error("memory is freed without garbage")
		}
		garbage = append(garbage, make([]byte, freeLeast)...)
		m.postpone()
		if freed(rest - 1) {
			t.Error("memory is freed too early")
		}
		m.postpone()
		if freed(rest-1) || !freed(1) {
			t.Error("memory is not freed 2 s after the last push")
		}
		runtime.KeepAlive(garbage)
	})
}
