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
		freed := func(after time.Duration) bool {
			before := m.freed
			time.Sleep(after) //nolint:forbidigo // the bubble's clock
			synctest.Wait()
			return m.freed != before
		}
		if freed(rest-1) || !freed(1) {
			t.Error("the memory of the start is not freed after 2 s")
		}
		m.postpone()
		m.freed = allocated()
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
