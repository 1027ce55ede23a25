package cache_test

import (
	"testing"

	"github.com/nametap/nametap/dnsproxy/cache"
)

// F8, R4: Get counts answers, CountMiss questions that are asked.
func TestCountMiss(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	c.Get(key("a"), clock.Time)
	if s := c.Stats(); s != (cache.Stats{}) {
		t.Errorf("Stats = %+v", s)
	}
	for _, state := range []cache.State{cache.Miss, cache.Fresh, cache.Stale, cache.StaleNow, cache.Failed} {
		c.CountMiss(state)
	}
	if s := c.Stats(); s != (cache.Stats{Misses: 1, Stale: 1}) {
		t.Errorf("Stats = %+v", s)
	}
	off := cache.New(cache.Config{})
	off.CountMiss(cache.Miss)
	if s := off.Stats(); s != (cache.Stats{}) {
		t.Errorf("without a cache Stats = %+v", s)
	}
}
