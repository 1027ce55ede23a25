package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"
)

// pushes writes a generation every second.
func (w *world) pushes(ctx context.Context) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := w.tables.push(); err != nil {
			w.tb.Errorf("writing a table: %v", err)
			return
		}
	}
}

// disturbControl restarts the control plane at random times. It is away for up to 8 s.
func (w *world) disturbControl(ctx context.Context, random *rand.Rand) {
	for sleep(ctx, between(random, 10*time.Second, 30*time.Second)) {
		signal := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[random.IntN(2)]
		pause := between(random, 0, 8*time.Second)
		w.timeline.note(fmt.Sprintf("the control plane ends by %v and is away for %v", signal, pause))
		thaw := w.tables.freeze()
		w.control.restart(ctx, signal, pause)
		thaw()
	}
}

// sleep waits for d, and reports whether ctx has not ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// between returns a random duration.
func between(random *rand.Rand, shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(random.Int64N(int64(longest-shortest)))
}
