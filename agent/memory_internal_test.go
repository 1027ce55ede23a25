//nolint:forbidigo // the test runs in a synctest bubble, whose clock Sleep advances
package agent

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Memory is freed once after each pause in pushes, and not between pushes that follow each
// other closely.
func TestMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, freed := newMemory(), atomic.Int32{}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go m.run(ctx, func() { freed.Add(1) })
		want := func(what string, n int32) {
			t.Helper()
			synctest.Wait()
			if got := freed.Load(); got != n {
				t.Errorf("%s: freed %d times, want %d", what, got, n)
			}
		}
		for range 10 {
			m.note()
			time.Sleep(freeAfter / 2)
		}
		want("between pushes", 0)
		time.Sleep(freeAfter)
		want("after them", 1)
		time.Sleep(time.Hour)
		want("without pushes", 1)
		m.note()
		m.note()
		time.Sleep(freeAfter)
		want("after another one", 2)
	})
}
