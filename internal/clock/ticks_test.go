package clock_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// R11: all that polls does so at the same ticks, as often as it wants, until it is stopped.
func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clock.From(func() time.Duration { return 0 })
		began := time.Now()
		var calls [2][]time.Duration
		for i, every := range []time.Duration{clock.Tick, 5 * clock.Tick} {
			time.Sleep(clock.Tick / 3) //nolint:forbidigo // synctest advances the time
			found, stop := c.Poll(every, func() bool {
				calls[i] = append(calls[i], time.Since(began))
				return len(calls[i]) == 2
			})
			defer func() {
				stop()
				if n := len(found); n != 1 {
					t.Errorf("poll %d has found something %d times", i, n)
				}
				n := len(calls[i])
				time.Sleep(time.Minute) //nolint:forbidigo // synctest advances the time
				if len(calls[i]) != n {
					t.Errorf("poll %d goes on after its end", i)
				}
			}()
		}
		time.Sleep(10 * clock.Tick) //nolint:forbidigo // synctest advances the time
		synctest.Wait()
		for i, every := range []time.Duration{clock.Tick, 5 * clock.Tick} {
			for n, at := range calls[i] {
				if at != clock.Tick/3+time.Duration(n+1)*every {
					t.Errorf("call %d of poll %d was after %v", n+1, i, at)
				}
			}
		}
		if len(calls[0]) != 10 || len(calls[1]) != 2 {
			t.Errorf("there were %d and %d calls", len(calls[0]), len(calls[1]))
		}
	})
}

// C5: the pause after failures doubles up to its limit, however many there are.
func TestBackOff(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]time.Duration{0: 10, 1: 20, 4: 160, 5: 250, 1 << 30: 250} {
		if got := clock.BackOff(n, 10, 250); got != want {
			t.Errorf("after %d failures: %d, want %d", n, got, want)
		}
	}
}
