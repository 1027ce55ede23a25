package clock_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// V7: a suspend, which Go's time does not count, passes on the clock. Only the time since the
// clock was made counts.
func TestSuspend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asleep := time.Hour
		c := clock.From(func() time.Duration { return asleep })
		began := c.Now()
		if !began.Equal(time.Now()) {
			t.Errorf("a new clock shows %v, want %v", began, time.Now())
		}
		for _, step := range []struct{ awake, asleep, want time.Duration }{
			{time.Second, 0, time.Second},
			{time.Second, 8 * time.Hour, 8*time.Hour + 2*time.Second},
			{10 * time.Millisecond, time.Minute, 8*time.Hour + time.Minute + 2010*time.Millisecond},
			// The kernel's clocks are read one after the other, so that a suspend may seem
			// shorter in a later reading.
			{time.Second, -time.Millisecond, 8*time.Hour + time.Minute + 3010*time.Millisecond},
		} {
			asleep += step.asleep
			time.Sleep(step.awake) //nolint:forbidigo // synctest advances the time
			if got := c.Since(began); got != step.want {
				t.Errorf("%v have passed, want %v", got, step.want)
			}
		}
		if got := c.Slept(); got != 8*time.Hour+time.Minute {
			t.Errorf("slept for %v", got)
		}
	})
}

// V7: the time asleep is read at most every 10 ms, and the time never goes back.
func TestReadings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		readings := 0
		c := clock.From(func() time.Duration { readings++; return 0 })
		for range 1000 {
			time.Sleep(time.Millisecond) //nolint:forbidigo // synctest advances the time
			c.Now()
		}
		if readings > 101 {
			t.Errorf("%d readings in a second", readings)
		}
	})
	c := clock.New()
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			last := c.Now()
			for range 100_000 {
				now := c.Now()
				if now.Before(last) {
					t.Errorf("%v after %v", now, last)
				}
				last = now
			}
		})
	}
	readers.Wait()
	if allocs := testing.AllocsPerRun(100, func() { c.Now() }); allocs != 0 {
		t.Errorf("Now makes %v allocations", allocs)
	}
}
